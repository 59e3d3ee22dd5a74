// What all calls of CUDA's interfaces have in common.
#pragma once

#include "copies.h"
#include "graphs.h"

namespace fakecuda {

// An error of either interface.
struct Failure {
  int error;
  operator cudaError_t() const { return result(error); }
  operator CUresult() const { return driver_result(error); }
};

#define CALLED() \
  if (int failed = settings.called(__func__)) return Failure{failed}
#define CONTEXT() \
  if (int failed = use_context()) return result(failed)
#define STREAM(name, handle)                      \
  auto name = stream_of(handle);                  \
  if (!name) return result(cudaErrorInvalidResourceHandle)
#define EVENT(name, handle)                       \
  auto name = event_of(handle);                   \
  if (!name) return result(cudaErrorInvalidResourceHandle)
#define UNSAFE() \
  if (int failed = unsafe_call()) return result(failed)

inline int create_stream(void** made, unsigned flags, int priority) {
  if (int error = use_context()) return error;
  if (int error = unsafe_call()) return error;
  auto stream = std::make_shared<Stream>(current_device, flags, priority, false);
  Lock lock(streams_mutex);
  streams[stream.get()] = stream;
  *made = stream.get();
  return 0;
}

inline int destroy_stream(void* handle) {
  auto stream = stream_of(handle);
  if (!handle || !stream) return cudaErrorInvalidResourceHandle;
  {
    Lock lock(streams_mutex);
    streams.erase(handle);
  }
  Lock lock(stream->mutex);
  stream->is_destroyed = true;
  stream->changed.notify_all();
  return 0;
}

inline void describe(cudaDeviceProp* made, int device) {
  memset(made, 0, sizeof *made);
  snprintf(made->name, sizeof made->name, "Fake CUDA device %d", device);
  made->uuid.bytes[0] = static_cast<char>(0xFA), made->uuid.bytes[15] = static_cast<char>(device);
  made->totalGlobalMem = kMemory;
  made->sharedMemPerBlock = 48 << 10, made->sharedMemPerBlockOptin = 227 << 10, made->sharedMemPerMultiprocessor = 228 << 10;
  made->regsPerBlock = made->regsPerMultiprocessor = 65536;
  made->warpSize = 32;
  made->memPitch = 0x7fffffff;
  made->maxThreadsPerBlock = 1024, made->maxThreadsPerMultiProcessor = 2048, made->maxBlocksPerMultiProcessor = 32;
  made->maxThreadsDim[0] = made->maxThreadsDim[1] = 1024, made->maxThreadsDim[2] = 64;
  made->maxGridSize[0] = 0x7fffffff, made->maxGridSize[1] = made->maxGridSize[2] = 65535;
  made->totalConstMem = 65536;
  made->major = 9, made->minor = 0;
  made->textureAlignment = 512, made->multiProcessorCount = 8;
  made->canMapHostMemory = made->concurrentKernels = made->unifiedAddressing = made->streamPrioritiesSupported = 1;
  made->hostRegisterSupported = made->canUseHostPointerForRegisteredMem = made->memoryPoolsSupported = 1;
  made->asyncEngineCount = 3, made->memoryBusWidth = 5120, made->l2CacheSize = 50 << 20;
  made->pciBusID = 0x10 + device, made->pciDeviceID = 0, made->pciDomainID = 0;
}

} // namespace fakecuda
