// The runtime API: devices and errors.
#include "calls.h"

using namespace fakecuda;

EXPORT cudaError_t cudaGetDeviceCount(int* count) {
  CALLED();
  *count = kDevices;
  if (!kDevices) return result(cudaErrorNoDevice);
  return result(initialise());
}
EXPORT cudaError_t cudaGetDevice(int* device) {
  CALLED();
  *device = current_device;
  return cudaSuccess;
}
EXPORT cudaError_t cudaSetDevice(int device) {
  CALLED();
  if (device < 0 || device >= kDevices) return result(cudaErrorInvalidDevice);
  current_device = device;
  return result(use_context()); // since CUDA 12 this makes the context
}
EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* made, int device) {
  CALLED();
  if (device < 0 || device >= kDevices) return result(cudaErrorInvalidDevice);
  describe(made, device);
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  CALLED();
  cudaDeviceProp facts;
  if (device < 0 || device >= kDevices) return result(cudaErrorInvalidDevice);
  describe(&facts, device);
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = facts.maxThreadsPerBlock; break;
    case cudaDevAttrMultiProcessorCount: *value = facts.multiProcessorCount; break;
    case cudaDevAttrComputeCapabilityMajor: *value = facts.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = facts.minor; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrPciBusId: *value = facts.pciBusID; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 227 << 10; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrHostRegisterSupported:
    case cudaDevAttrCanUseHostPointerForRegisteredMem:
    case cudaDevAttrMemoryPoolsSupported: *value = 1; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
EXPORT cudaError_t cudaDriverGetVersion(int* version) {
  CALLED();
  return *version = kDevices ? 13000 : 0, cudaSuccess;
}
EXPORT cudaError_t cudaRuntimeGetVersion(int* version) { CALLED(); return *version = 13000, cudaSuccess; }
EXPORT cudaError_t cudaGetLastError() {
  CALLED();
  auto found = settings.sticky ? static_cast<cudaError_t>(settings.sticky.load()) : last_error;
  last_error = cudaSuccess;
  return found;
}
EXPORT cudaError_t cudaPeekAtLastError() {
  CALLED();
  return settings.sticky ? static_cast<cudaError_t>(settings.sticky.load()) : last_error;
}

#define ERRORS(_)                                                                         \
  _(cudaSuccess, "no error")                                                              \
  _(cudaErrorInvalidValue, "invalid argument")                                            \
  _(cudaErrorMemoryAllocation, "out of memory")                                           \
  _(cudaErrorInitializationError, "initialization error")                                 \
  _(cudaErrorNoDevice, "no CUDA-capable device is detected")                              \
  _(cudaErrorInvalidDevice, "invalid device ordinal")                                     \
  _(cudaErrorInvalidResourceHandle, "invalid resource handle")                            \
  _(cudaErrorIllegalState, "the operation cannot be performed in the present state")      \
  _(cudaErrorNotReady, "device not ready")                                                \
  _(cudaErrorIllegalAddress, "an illegal memory access was encountered")                  \
  _(cudaErrorAssert, "device-side assert triggered")                                      \
  _(cudaErrorHostMemoryAlreadyRegistered, "part or all of the requested memory range is already mapped") \
  _(cudaErrorHostMemoryNotRegistered, "pointer does not correspond to a registered memory region") \
  _(cudaErrorLaunchFailure, "unspecified launch failure")                                 \
  _(cudaErrorNotSupported, "operation not supported")                                     \
  _(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing") \
  _(cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture") \
  _(cudaErrorStreamCaptureMerge, "operation would result in a merge of separate capture sequences") \
  _(cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream") \
  _(cudaErrorCapturedEvent, "operation not permitted on an event last recorded in a capturing stream") \
  _(cudaErrorStreamCaptureWrongThread, "attempt to terminate a thread-local capture sequence from another thread") \
  _(cudaErrorPeerAccessAlreadyEnabled, "peer access is already enabled")                  \
  _(cudaErrorUnknown, "unknown error")

EXPORT const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
#define CASE(name, text) \
  case name: return text;
    ERRORS(CASE)
#undef CASE
    default: return "unrecognized error code";
  }
}
EXPORT const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
#define CASE(name, text) \
  case name: return #name;
    ERRORS(CASE)
#undef CASE
    default: return "unrecognized error code";
  }
}
EXPORT cudaError_t cudaDeviceSynchronize() {
  CALLED();
  CONTEXT();
  return result(synchronise_device(current_device));
}
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  CALLED();
  CONTEXT();
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { CALLED(); return *can = 1, cudaSuccess; }
EXPORT cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { CALLED(); return cudaSuccess; }
EXPORT cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  CALLED();
  snprintf(text, size, "0000:%02x:00.0", 0x10 + device);
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetByPCIBusId(int* device, const char* text) {
  CALLED();
  unsigned domain, bus;
  if (sscanf(text, "%x:%x", &domain, &bus) != 2 || int(bus) - 0x10 >= kDevices) return result(cudaErrorInvalidValue);
  return *device = int(bus) - 0x10, cudaSuccess;
}
EXPORT cudaError_t cudaDeviceReset() { CALLED(); return result(cudaErrorNotSupported); }
EXPORT cudaError_t cudaDeviceSetLimit(cudaLimit, size_t) { CALLED(); return cudaSuccess; }
EXPORT cudaError_t cudaDeviceGetLimit(size_t* value, cudaLimit) { CALLED(); return *value = 0, cudaSuccess; }
EXPORT cudaError_t cudaSetDeviceFlags(unsigned) { CALLED(); return cudaSuccess; }
EXPORT cudaError_t cudaGetDeviceFlags(unsigned* flags) { CALLED(); return *flags = 0, cudaSuccess; }
EXPORT cudaError_t cudaProfilerStart() { CALLED(); return cudaSuccess; }
EXPORT cudaError_t cudaProfilerStop() { CALLED(); return cudaSuccess; }
