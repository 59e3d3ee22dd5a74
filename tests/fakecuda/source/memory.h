// Memory of devices, which the host can't access; host memory that is locked.
#pragma once

#include "streams.h"

namespace fakecuda {

struct Arena {
  char* device = nullptr; // where nothing can be read
  char* host = nullptr;
  std::map<uintptr_t, size_t> taken; // address -> bytes
  size_t used = 0;
};

inline std::mutex memory_mutex;
inline Arena arenas[kMostDevices];

inline char* map(size_t nbytes, int protection) {
  void* found = mmap(nullptr, nbytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) abort();
  madvise(found, nbytes, MADV_DONTFORK);
  return static_cast<char*>(found);
}

inline Arena& arena_of(int device) {
  Arena& arena = arenas[device];
  if (!arena.device) {
    arena.host = map(kArenaBytes, PROT_READ | PROT_WRITE);
    arena.device = map(kArenaBytes, PROT_NONE);
  }
  return arena;
}

inline int device_of(const void* address) {
  auto* at = static_cast<const char*>(address);
  for (int device = 0; device < kDevices; device++)
    if (arenas[device].device && at >= arenas[device].device && at < arenas[device].device + kArenaBytes) return device;
  return -1;
}

// Where a stream's thread finds memory of the device.
inline char* alias_of(const void* address) {
  int device = device_of(address);
  return device < 0 ? nullptr : arenas[device].host + (static_cast<const char*>(address) - arenas[device].device);
}

inline bool is_allocated(const void* address, size_t nbytes) {
  int device = device_of(address);
  if (device < 0) return false;
  Lock lock(memory_mutex);
  auto& taken = arenas[device].taken;
  auto at = reinterpret_cast<uintptr_t>(address);
  auto found = taken.upper_bound(at);
  if (found == taken.begin()) return false;
  --found;
  return at + nbytes <= found->first + found->second;
}

inline int allocate(void** address, size_t nbytes, int device) {
  *address = nullptr;
  if (int error = settings.sticky) return error;
  if (!nbytes) return 0;
  size_t size = (nbytes + kGrain - 1) / kGrain * kGrain;
  Lock lock(memory_mutex);
  Arena& arena = arena_of(device);
  if (arena.used + size > kMemory) return cudaErrorMemoryAllocation;
  auto at = reinterpret_cast<uintptr_t>(arena.device), end = at + kPlainBytes;
  for (auto& each : arena.taken) { // first fit
    if (each.first - at >= size) break;
    at = each.first + each.second;
  }
  if (at + size > end) return cudaErrorMemoryAllocation;
  arena.taken[at] = size;
  arena.used += size;
  *address = reinterpret_cast<void*>(at);
  return 0;
}

inline int release(void* address) {
  int device = device_of(address);
  if (device < 0) return cudaErrorInvalidValue;
  Lock lock(memory_mutex);
  auto& arena = arenas[device];
  auto found = arena.taken.find(reinterpret_cast<uintptr_t>(address));
  if (found == arena.taken.end()) return cudaErrorInvalidValue;
  char* host = arena.host + (static_cast<char*>(address) - arena.device);
  auto first = (reinterpret_cast<uintptr_t>(host) + 4095) & ~uintptr_t(4095);
  auto last = (reinterpret_cast<uintptr_t>(host) + found->second) & ~uintptr_t(4095);
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
  arena.used -= found->second;
  arena.taken.erase(found);
  return 0;
}


struct Registered {
  size_t nbytes;
  bool is_owned; // by cudaHostAlloc
  std::shared_ptr<std::atomic<int>> in_flight;
};
inline std::mutex registered_mutex;
inline std::map<uintptr_t, Registered> registered;

using Counter = std::shared_ptr<std::atomic<int>>;

inline Counter find_registered(const void* address, size_t nbytes) {
  Lock lock(registered_mutex);
  auto at = reinterpret_cast<uintptr_t>(address);
  auto found = registered.upper_bound(at);
  if (found == registered.begin()) return nullptr;
  --found;
  return at + std::max<size_t>(nbytes, 1) <= found->first + found->second.nbytes ? found->second.in_flight : nullptr;
}

inline std::shared_ptr<void> counted(const Counter& counter) { // a copy in flight until its task is dropped, run or not
  if (!counter) return nullptr;
  ++*counter;
  return {nullptr, [counter](void*) { --*counter; }};
}

inline int register_host(void* address, size_t nbytes, bool is_owned) {
  settings.counts[REGISTER]++;
  settings.delay(REGISTER);
  if (!address || !nbytes) return cudaErrorInvalidValue;
  Lock lock(registered_mutex);
  auto at = reinterpret_cast<uintptr_t>(address);
  auto next = registered.lower_bound(at + nbytes);
  if (next != registered.begin() && (--next)->first + next->second.nbytes > at) return cudaErrorHostMemoryAlreadyRegistered;
  registered[at] = {nbytes, is_owned, std::make_shared<std::atomic<int>>(0)};
  return 0;
}

inline int unregister_host(void* address, bool is_owned, size_t* nbytes = nullptr) {
  Lock lock(registered_mutex);
  auto found = registered.find(reinterpret_cast<uintptr_t>(address));
  if (found == registered.end() || found->second.is_owned != is_owned)
    return is_owned ? cudaErrorInvalidValue : cudaErrorHostMemoryNotRegistered;
  if (*found->second.in_flight) settings.misuse("host memory was unlocked while copies used it");
  if (nbytes) *nbytes = found->second.nbytes;
  registered.erase(found);
  return 0;
}

inline int allocate_host(void** address, size_t nbytes) {
  *address = nullptr;
  if (int error = unsafe_call()) return error;
  if (!nbytes) return 0;
  size_t size = (nbytes + 4095) / 4096 * 4096;
  void* found = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) return cudaErrorMemoryAllocation;
  register_host(found, size, true);
  *address = found;
  return 0;
}

inline int free_host(void* address) {
  if (!address) return 0;
  if (int error = unsafe_call()) return error;
  for (int device = 0; device < kDevices; device++) // as CUDA does
    for (auto& stream : streams_on(device)) stream->wait_idle();
  size_t nbytes = 0;
  if (int error = unregister_host(address, true, &nbytes)) return error;
  munmap(address, nbytes);
  return 0;
}

} // namespace fakecuda
