// The driver API.
#include "calls.h"

using namespace fakecuda;

// Contexts are primary ones: the address of a device's flag.
static CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(&active[device]); }
static int device_of_context(CUcontext context) {
  auto* flag = reinterpret_cast<std::atomic<bool>*>(context);
  return flag >= active && flag < active + kDevices ? static_cast<int>(flag - active) : -1;
}
static thread_local std::vector<int> pushed;

static int not_supported() { return CUDA_ERROR_NOT_SUPPORTED; }

EXPORT CUresult cuInit(unsigned) {
  CALLED();
  if (!kDevices) return CUDA_ERROR_NO_DEVICE;
  return driver_result(initialise());
}
EXPORT CUresult cuDriverGetVersion(int* version) { CALLED(); return *version = 13000, CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetCount(int* count) { CALLED(); return *count = kDevices, CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGet(CUdevice* device, int index) {
  CALLED();
  if (index < 0 || index >= kDevices) return CUDA_ERROR_INVALID_DEVICE;
  return *device = index, CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetName(char* name, int size, CUdevice device) {
  CALLED();
  return snprintf(name, size, "Fake CUDA device %d", device), CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  CALLED();
  return driver_result(cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), device));
}
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  CALLED();
  if (device < 0 || device >= kDevices) return CUDA_ERROR_INVALID_DEVICE;
  active[device] = true;
  return *context = context_of(device), CUDA_SUCCESS;
}
EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice) { CALLED(); return CUDA_SUCCESS; }
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* is_active) {
  CALLED();
  if (flags) *flags = 0;
  return *is_active = active[device], CUDA_SUCCESS;
}
EXPORT CUresult cuCtxPushCurrent(CUcontext context) {
  CALLED();
  int device = device_of_context(context);
  if (device < 0) return CUDA_ERROR_INVALID_CONTEXT;
  pushed.push_back(current_device);
  return current_device = device, CUDA_SUCCESS;
}
EXPORT CUresult cuCtxPopCurrent(CUcontext* context) {
  CALLED();
  if (pushed.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (context) *context = context_of(current_device);
  current_device = pushed.back();
  pushed.pop_back();
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetCurrent(CUcontext* context) {
  CALLED();
  return *context = active[current_device] ? context_of(current_device) : nullptr, CUDA_SUCCESS;
}
EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
  CALLED();
  int device = device_of_context(context);
  if (device >= 0) current_device = device;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetDevice(CUdevice* device) { CALLED(); return *device = current_device, CUDA_SUCCESS; }
EXPORT CUresult cuCtxSynchronize() { CALLED(); return driver_result(synchronise_device(current_device)); }
EXPORT CUresult cuStreamCreate(CUstream* made, unsigned flags) {
  CALLED();
  return driver_result(create_stream(reinterpret_cast<void**>(made), flags, 0));
}
EXPORT CUresult cuStreamCreateWithPriority(CUstream* made, unsigned flags, int priority) {
  CALLED();
  return driver_result(create_stream(reinterpret_cast<void**>(made), flags, priority));
}
EXPORT CUresult cuStreamDestroy(CUstream handle) { CALLED(); return driver_result(destroy_stream(handle)); }
EXPORT CUresult cuStreamSynchronize(CUstream handle) {
  CALLED();
  auto stream = stream_of(handle);
  return stream ? driver_result(synchronise(stream)) : CUDA_ERROR_INVALID_HANDLE;
}
EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  CALLED();
  auto other = static_cast<cudaStreamCaptureMode>(*mode);
  std::swap(other, interaction);
  return *mode = static_cast<CUstreamCaptureMode>(other), CUDA_SUCCESS;
}
EXPORT CUresult cuMemHostRegister(void* address, size_t nbytes, unsigned) {
  CALLED();
  if (int error = use_context()) return driver_result(error);
  if (int error = unsafe_call()) return driver_result(error);
  return driver_result(register_host(address, nbytes, false));
}
EXPORT CUresult cuMemHostUnregister(void* address) {
  CALLED();
  if (int error = unsafe_call()) return driver_result(error);
  return driver_result(unregister_host(address, false));
}

static CUresult copy_batch(const CUdeviceptr* targets, const CUdeviceptr* sources, const size_t* sizes, size_t count,
                           const CUmemcpyAttributes* attributes, const size_t* firsts, size_t kinds, size_t* failed, CUstream handle) {
  if (int error = use_context()) return driver_result(error);
  auto stream = stream_of(handle);
  if (failed) *failed = SIZE_MAX;
  if (!stream || !handle || handle == CU_STREAM_LEGACY) return CUDA_ERROR_INVALID_VALUE; // refused by CUDA as well
  if (!count || !kinds || kinds > count || firsts[0] != 0) return CUDA_ERROR_INVALID_VALUE;
  if (capture_of(stream)) {
    invalidate(capture_of(stream), cudaErrorStreamCaptureUnsupported);
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  auto order = attributes[0].srcAccessOrder;
  if (order < CU_MEMCPY_SRC_ACCESS_ORDER_STREAM || order > CU_MEMCPY_SRC_ACCESS_ORDER_ANY) return CUDA_ERROR_INVALID_VALUE;
  std::vector<size_t> numbers(count); // in any order, as the documentation says
  for (size_t each = 0; each < count; each++) numbers[each] = each;
  for (size_t each = count; each > 1; each--) std::swap(numbers[each - 1], numbers[settings.next_random() % each]);
  for (size_t each : numbers) {
    int error = copy(reinterpret_cast<void*>(targets[each]), reinterpret_cast<void*>(sources[each]),
                     {sizes[each], 1, sizes[each], sizes[each]}, stream, true);
    if (error) {
      if (failed) *failed = each;
      return driver_result(error);
    }
  }
  return CUDA_SUCCESS;
}
EXPORT CUresult fakecuda_memcpy_batch_12(CUdeviceptr* targets, CUdeviceptr* sources, size_t* sizes, size_t count,
    CUmemcpyAttributes* attributes, size_t* firsts, size_t kinds, size_t* failed, CUstream stream) __asm__("cuMemcpyBatchAsync");
EXPORT CUresult fakecuda_memcpy_batch_12(CUdeviceptr* targets, CUdeviceptr* sources, size_t* sizes, size_t count,
    CUmemcpyAttributes* attributes, size_t* firsts, size_t kinds, size_t* failed, CUstream stream) {
  if (int refused = settings.called("cuMemcpyBatchAsync")) return driver_result(refused);
  return copy_batch(targets, sources, sizes, count, attributes, firsts, kinds, failed, stream);
}
EXPORT CUresult cuMemcpyBatchAsync(CUdeviceptr* targets, CUdeviceptr* sources, size_t* sizes, size_t count,
    CUmemcpyAttributes* attributes, size_t* firsts, size_t kinds, CUstream stream) { CALLED(); // _v2
  return copy_batch(targets, sources, sizes, count, attributes, firsts, kinds, nullptr, stream);
}
EXPORT CUresult cuGetErrorString(CUresult error, const char** text) {
  CALLED();
  return *text = cudaGetErrorString(static_cast<cudaError_t>(error)), CUDA_SUCCESS;
}
EXPORT CUresult cuGetErrorName(CUresult error, const char** text) {
  CALLED();
  return *text = cudaGetErrorName(static_cast<cudaError_t>(error)), CUDA_SUCCESS;
}
EXPORT CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr address) {
  CALLED();
  auto* at = reinterpret_cast<void*>(address);
  int device = device_of(at);
  if (device < 0 && !find_registered(at, 1)) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *static_cast<CUcontext*>(data) = context_of(std::max(0, device)); break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<unsigned*>(data) = device >= 0 ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
      break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *static_cast<int*>(data) = device; break;
    default: return CUDA_ERROR_NOT_SUPPORTED;
  }
  return CUDA_SUCCESS;
}

// Virtual memory, for expandable segments: pages of the alias are mapped from one file, which has no name.
static std::mutex pages_mutex;
static int pages_file = -1;
static size_t pages_end = 0;
static std::map<uint64_t, std::pair<size_t, int>> pages; // handle, which is the offset + 1 -> bytes, device
static std::map<uintptr_t, size_t> reserved;

EXPORT CUresult cuMemGetAllocationGranularity(size_t* found, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  CALLED();
  return *found = 2 << 20, CUDA_SUCCESS;
}
EXPORT CUresult cuMemAddressReserve(CUdeviceptr* address, size_t nbytes, size_t, CUdeviceptr, unsigned long long) {
  CALLED();
  static size_t next = 0;
  Lock lock(pages_mutex);
  Arena* arena;
  {
    Lock memory(memory_mutex);
    arena = &arena_of(current_device);
  }
  if (next + nbytes > kReservedBytes) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = reinterpret_cast<CUdeviceptr>(arena->device + kPlainBytes + next);
  reserved[*address] = nbytes;
  next += nbytes;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t) {
  CALLED();
  Lock lock(pages_mutex);
  reserved.erase(address);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle* made, size_t nbytes, const CUmemAllocationProp* properties, unsigned long long) {
  CALLED();
  Lock lock(pages_mutex);
  if (pages_file < 0) pages_file = memfd_create("fakecuda", MFD_CLOEXEC);
  {
    Lock memory(memory_mutex);
    auto& arena = arena_of(properties->location.id);
    if (arena.used + nbytes > kMemory) return CUDA_ERROR_OUT_OF_MEMORY;
    arena.used += nbytes;
  }
  *made = pages_end + 1;
  pages[*made] = {nbytes, properties->location.id};
  pages_end += nbytes;
  return ftruncate(pages_file, pages_end) ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  CALLED();
  Lock lock(pages_mutex);
  auto found = pages.find(handle);
  if (found == pages.end()) return CUDA_ERROR_INVALID_VALUE;
  Lock memory(memory_mutex);
  arenas[found->second.second].used -= found->second.first;
  pages.erase(found); // the file's pages stay: a hole would take what is still mapped
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemMap(CUdeviceptr address, size_t nbytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long) {
  CALLED();
  auto* at = alias_of(reinterpret_cast<void*>(address));
  Lock lock(pages_mutex);
  void* found = mmap(at, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, pages_file, handle - 1 + offset);
  if (found == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  madvise(at, nbytes, MADV_DONTFORK);
  Lock memory(memory_mutex);
  auto& taken = arenas[device_of(reinterpret_cast<void*>(address))].taken;
  // Tensors lie across neighbouring mappings.
  auto [place, _] = taken.insert_or_assign(address, nbytes);
  if (place != taken.begin()) {
    auto before = std::prev(place);
    if (before->first + before->second == address) {
      before->second += nbytes;
      taken.erase(place);
      place = before;
    }
  }
  auto after = std::next(place);
  if (after != taken.end() && place->first + place->second == after->first) {
    place->second += after->second;
    taken.erase(after);
  }
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t nbytes) {
  CALLED();
  for (int device = 0; device < kDevices; device++)
    for (auto& stream : streams_on(device)) stream->wait_idle();
  auto* at = alias_of(reinterpret_cast<void*>(address));
  mmap(at, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  Lock memory(memory_mutex);
  auto& taken = arenas[device_of(reinterpret_cast<void*>(address))].taken;
  auto found = std::prev(taken.upper_bound(address));
  uintptr_t begin = found->first, end = begin + found->second;
  taken.erase(found);
  if (address > begin) taken[begin] = address - begin;
  if (address + nbytes < end) taken[address + nbytes] = end - address - nbytes;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) {
  CALLED();
  return CUDA_SUCCESS;
}

static void* entry_point(const char* symbol) {
  static void* self = dlopen("libcudart.so.13", RTLD_LAZY | RTLD_NOLOAD);
  for (const char* suffix : {"_v3", "_v2", ""}) {
    if (void* found = dlsym(self, (std::string(symbol) + suffix).c_str())) return found;
  }
  if (getenv("FAKECUDA_VERBOSE")) fprintf(stderr, "fakecuda: the driver has no %s\n", symbol);
  return reinterpret_cast<void*>(&not_supported);
}
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(
    const char* symbol, void** found, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* status) {
  CALLED();
  *found = entry_point(symbol);
  if (status) *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
