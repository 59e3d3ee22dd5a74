// NVML, without which torch has no expandable segments; and the driver's name for the loader.
#include "calls.h"

using namespace fakecuda;

static char the_device;
EXPORT int nvmlInit_v2() { return 0; }
EXPORT int nvmlInit() { return 0; }
EXPORT int nvmlShutdown() { return 0; }
EXPORT int nvmlDeviceGetCount_v2(int* count) { return *count = kDevices, 0; }
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** handle) { return *handle = &the_device, 0; }
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2() { return 3; } // not supported
EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType() { return 3; }
EXPORT int nvmlDeviceGetGpuFabricInfoV() { return 3; }
EXPORT int nvmlDeviceGetComputeRunningProcesses() { return 3; }
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int* version) { return *version = 13000, 0; }

// Those who ask the loader for the driver by its name find it loaded.
__attribute__((constructor)) static void load_driver() {
  Dl_info self;
  if (!dladdr(reinterpret_cast<void*>(&load_driver), &self)) return;
  std::string folder(self.dli_fname);
  folder.resize(folder.rfind('/') + 1);
  for (const char* name : {"libcuda.so.1", "libnvidia-ml.so.1"}) dlopen((folder + name).c_str(), RTLD_LAZY);
}
