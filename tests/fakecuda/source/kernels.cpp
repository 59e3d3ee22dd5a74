// The runtime API: kernels, of which there are none but the one that sleeps; what is refused.
#include "calls.h"

using namespace fakecuda;

inline std::mutex kernels_mutex;
inline std::unordered_map<const void*, std::string>& kernels = *new std::unordered_map<const void*, std::string>;

inline thread_local struct {
  dim3 grid, block;
  size_t shared;
  void* stream;
} call_configuration;

inline int launch_kernel(const void* function, void** args, const StreamPtr& stream) {
  std::string name;
  {
    Lock lock(kernels_mutex);
    auto found = kernels.find(function);
    name = found == kernels.end() ? "an unknown function" : found->second;
  }
  if (name.find("spin_kernel") != std::string::npos) { // torch.cuda._sleep; at 2 GHz
    int64_t cycles = *static_cast<int64_t*>(args[0]);
    return enqueue(stream, {KERNEL, [cycles] { std::this_thread::sleep_for(std::chrono::nanoseconds(cycles / 2)); }});
  }
  fprintf(stderr, "fakecuda: no such kernel here: %s\n", name.c_str());
  settings.misuse("no such kernel here: " + name);
  if (getenv("FAKECUDA_ABORT")) abort();
  return cudaErrorNotSupported;
}

EXPORT void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}
EXPORT char __cudaInitModule(void**) { return 1; }
EXPORT void __cudaRegisterFunction(
    void**, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  Lock lock(kernels_mutex);
  kernels[function] = name;
}
EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
EXPORT void __cudaRegisterManagedVar(void**, void**, char*, const char*, int, size_t, int, int) {}
EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  call_configuration = {grid, block, shared, stream};
  return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = call_configuration.grid, *block = call_configuration.block, *shared = call_configuration.shared;
  *static_cast<void**>(stream) = call_configuration.stream;
  return cudaSuccess;
}
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** args, size_t, cudaStream_t handle) {
  CONTEXT();
  STREAM(stream, handle);
  return result(launch_kernel(kernel, args, stream));
}
EXPORT cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** args, size_t, cudaStream_t handle) {
  CALLED();
  CONTEXT();
  STREAM(stream, handle);
  return result(launch_kernel(function, args, stream));
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** args) {
  CALLED();
  CONTEXT();
  STREAM(stream, config->stream);
  return result(launch_kernel(function, args, stream));
}
EXPORT cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3, dim3, void** args, size_t, cudaStream_t handle) {
  CALLED();
  CONTEXT();
  STREAM(stream, handle);
  return result(launch_kernel(function, args, stream));
}
EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* made, const void*) {
  CALLED();
  memset(made, 0, sizeof *made);
  made->maxThreadsPerBlock = 1024, made->binaryVersion = made->ptxVersion = 90, made->numRegs = 32;
  return cudaSuccess;
}
EXPORT cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { CALLED(); return cudaSuccess; }
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, const void*, int, size_t) {
  CALLED();
  return *count = 1, cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int, size_t, unsigned) {
  CALLED();
  return *count = 1, cudaSuccess;
}

// What torch is linked with, and does not need here.
#define UNSUPPORTED(name)                                                               \
  EXPORT int fakecuda_no_##name() __asm__(#name);                                       \
  EXPORT int fakecuda_no_##name() {                                                     \
    settings.misuse("not supported here: " #name);                                      \
    return last_error = cudaErrorNotSupported;                                          \
  }
UNSUPPORTED(cudaGetSymbolAddress)
UNSUPPORTED(cudaGraphAddNode)
UNSUPPORTED(cudaGraphConditionalHandleCreate)
UNSUPPORTED(cudaGraphNodeGetDependencies)
UNSUPPORTED(cudaIpcCloseMemHandle)
UNSUPPORTED(cudaIpcGetEventHandle)
UNSUPPORTED(cudaIpcGetMemHandle)
UNSUPPORTED(cudaIpcOpenEventHandle)
UNSUPPORTED(cudaIpcOpenMemHandle)
UNSUPPORTED(cudaKernelSetAttributeForDevice)
UNSUPPORTED(cudaLibraryGetKernel)
UNSUPPORTED(cudaLibraryLoadData)
UNSUPPORTED(cudaLibraryUnload)
UNSUPPORTED(cudaMemcpyToSymbol)
UNSUPPORTED(cudaStreamBeginCaptureToGraph)
UNSUPPORTED(cudaStreamUpdateCaptureDependencies)
UNSUPPORTED(cudaUserObjectCreate)
UNSUPPORTED(cudaGraphRetainUserObject)
UNSUPPORTED(cudaUserObjectRelease)
