// The runtime API: memory and copies.
#include "calls.h"

using namespace fakecuda;

EXPORT cudaError_t cudaMalloc(void** address, size_t nbytes) {
  CALLED();
  CONTEXT();
  UNSAFE();
  return result(allocate(address, nbytes, current_device));
}
EXPORT cudaError_t cudaFree(void* address) {
  CALLED();
  CONTEXT();
  if (!address) return cudaSuccess;
  UNSAFE();
  for (auto& stream : streams_on(std::max(0, device_of(address)))) stream->wait_idle();
  return result(release(address));
}
EXPORT cudaError_t cudaMallocAsync(void** address, size_t nbytes, cudaStream_t handle) {
  CALLED();
  CONTEXT();
  STREAM(stream, handle);
  return result(allocate(address, nbytes, stream->device));
}
EXPORT cudaError_t cudaMallocFromPoolAsync(void** address, size_t nbytes, cudaMemPool_t, cudaStream_t handle) {
  CALLED();
  return cudaMallocAsync(address, nbytes, handle);
}
EXPORT cudaError_t cudaFreeAsync(void* address, cudaStream_t handle) {
  CALLED();
  CONTEXT();
  STREAM(stream, handle);
  if (!address) return cudaSuccess;
  return result(enqueue(stream, {KERNEL, [address] { release(address); }, true}));
}
EXPORT cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
  CALLED();
  CONTEXT();
  Lock lock(memory_mutex);
  *total = kMemory;
  *available = kMemory - arenas[current_device].used;
  return cudaSuccess;
}
EXPORT cudaError_t cudaHostAlloc(void** address, size_t nbytes, unsigned) {
  CALLED();
  CONTEXT();
  return result(allocate_host(address, nbytes));
}
EXPORT cudaError_t cudaMallocHost(void** address, size_t nbytes) {
  CALLED();
  CONTEXT();
  return result(allocate_host(address, nbytes));
}
EXPORT cudaError_t cudaFreeHost(void* address) { CALLED(); return result(free_host(address)); }
EXPORT cudaError_t cudaHostRegister(void* address, size_t nbytes, unsigned) {
  CALLED();
  CONTEXT();
  UNSAFE();
  return result(register_host(address, nbytes, false));
}
EXPORT cudaError_t cudaHostUnregister(void* address) {
  CALLED();
  CONTEXT();
  UNSAFE();
  return result(unregister_host(address, false));
}
EXPORT cudaError_t cudaHostGetDevicePointer(void** device, void* address, unsigned) {
  CALLED();
  if (!find_registered(address, 1)) return result(cudaErrorInvalidValue);
  return *device = address, cudaSuccess;
}
EXPORT cudaError_t cudaHostGetFlags(unsigned* flags, void* address) {
  CALLED();
  if (!find_registered(address, 1)) return result(cudaErrorInvalidValue);
  return *flags = 0, cudaSuccess;
}
EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* made, const void* address) {
  CALLED();
  CONTEXT();
  memset(made, 0, sizeof *made);
  int device = device_of(address);
  if (device >= 0) {
    made->type = cudaMemoryTypeDevice;
    made->device = device;
    made->devicePointer = const_cast<void*>(address);
  } else if (find_registered(address, 1)) {
    made->type = cudaMemoryTypeHost;
    made->device = current_device;
    made->devicePointer = made->hostPointer = const_cast<void*>(address);
  } else {
    made->type = cudaMemoryTypeUnregistered;
    made->device = cudaInvalidDeviceId;
    made->hostPointer = const_cast<void*>(address);
  }
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t nbytes, cudaMemcpyKind, cudaStream_t handle) {
  CALLED();
  CONTEXT();
  STREAM(stream, handle);
  return result(copy(target, source, {nbytes, 1, nbytes, nbytes}, stream, true));
}
EXPORT cudaError_t cudaMemcpy(void* target, const void* source, size_t nbytes, cudaMemcpyKind) {
  CALLED();
  CONTEXT();
  STREAM(stream, nullptr);
  return result(copy(target, source, {nbytes, 1, nbytes, nbytes}, stream, false));
}
EXPORT cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t nbytes, cudaStream_t handle) {
  CALLED();
  CONTEXT();
  STREAM(stream, handle);
  return result(copy(target, source, {nbytes, 1, nbytes, nbytes}, stream, true));
}
EXPORT cudaError_t cudaMemcpy2DAsync(
    void* target,
    size_t target_pitch,
    const void* source,
    size_t source_pitch,
    size_t width,
    size_t height,
    cudaMemcpyKind,
    cudaStream_t handle) {
  CALLED();
  CONTEXT();
  STREAM(stream, handle);
  return result(copy(target, source, {width, height, target_pitch, source_pitch}, stream, true));
}
EXPORT cudaError_t cudaMemcpyBatchAsync(
    void* const* targets,
    const void* const* sources,
    const size_t* sizes,
    size_t count,
    cudaMemcpyAttributes*,
    size_t*,
    size_t,
    cudaStream_t handle) {
  CALLED();
  CONTEXT();
  STREAM(stream, handle);
  for (size_t each = 0; each < count; each++)
    if (int error = copy(targets[each], sources[each], {sizes[each], 1, sizes[each], sizes[each]}, stream, true))
      return result(error);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemsetAsync(void* target, int value, size_t nbytes, cudaStream_t handle) {
  CALLED();
  CONTEXT();
  STREAM(stream, handle);
  return result(fill(target, value, nbytes, 1, nbytes, 1, stream));
}
EXPORT cudaError_t cudaMemset(void* target, int value, size_t nbytes) {
  CALLED();
  return cudaMemsetAsync(target, value, nbytes, nullptr);
}

static char the_pool;
EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  CALLED();
  return *pool = reinterpret_cast<cudaMemPool_t>(&the_pool), cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetMemPool(cudaMemPool_t* pool, int device) {
  CALLED();
  return cudaDeviceGetDefaultMemPool(pool, device);
}
EXPORT cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
  CALLED();
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
  CALLED();
  return *static_cast<uint64_t*>(value) = 0, cudaSuccess;
}
EXPORT cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) {
  CALLED();
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { CALLED(); return cudaSuccess; }
EXPORT cudaError_t cudaDeviceGetGraphMemAttribute(int, cudaGraphMemAttributeType, void* value) {
  CALLED();
  return *static_cast<uint64_t*>(value) = 0, cudaSuccess;
}
EXPORT cudaError_t cudaDeviceSetGraphMemAttribute(int, cudaGraphMemAttributeType, void*) {
  CALLED();
  return cudaSuccess;
}
