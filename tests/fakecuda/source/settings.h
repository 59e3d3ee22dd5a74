// What the tests set, and what they ask for; see controls.cpp.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace fakecuda {

using Lock = std::unique_lock<std::mutex>;
using Clock = std::chrono::steady_clock;

// Kinds of tasks.
enum Kind { KERNEL, TO_HOST, FROM_HOST, ON_DEVICE, MEMSET, REGISTER, KINDS };

inline int number_from(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text && *text ? atoi(text) : otherwise;
}

constexpr int kMostDevices = 8;
// Of addresses; pages exist once they are used. The upper part is what programs reserve themselves.
constexpr size_t kPlainBytes = size_t(64) << 30, kReservedBytes = size_t(512) << 30, kArenaBytes = kPlainBytes + kReservedBytes;
constexpr size_t kGrain = 512;
inline const int kDevices = std::min(kMostDevices, std::max(0, number_from("FAKECUDA_DEVICES", 2)));
inline const size_t kMemory = std::min(kPlainBytes, size_t(number_from("FAKECUDA_MIB", 16384)) << 20);


struct Settings {
  std::atomic<uint64_t> random{1};
  std::atomic<int64_t> delay_us[KINDS] = {}; // at most
  std::atomic<int64_t> fault_after[KINDS] = {}; // tasks until one fails; 0: none fails
  std::atomic<int> fault[KINDS] = {};
  std::atomic<int64_t> counts[KINDS] = {};
  std::atomic<int64_t> bytes[KINDS] = {};
  std::atomic<int> sticky{0}; // the error of a context that is broken for good
  std::mutex mutex;
  std::condition_variable changed;
  struct Refusal { // of calls of one name
    int64_t after, count; // how many go well before, and how many do not; 0: all
    int error;
    bool breaks; // the context, for good
  };
  std::map<std::string, Refusal> refusals;
  std::map<std::string, int64_t> calls;
  int64_t refused = 0;
  std::set<int> held; // kinds of tasks that wait
  std::set<const void*> held_streams;
  std::vector<std::string> misuses;

  uint64_t next_random() { // splitmix64
    uint64_t z = random += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  void delay(Kind kind) {
    int64_t most = delay_us[kind];
    if (most <= 0) return;
    uint64_t drawn = next_random(); // half of the tasks are not delayed at all; else all would be late alike
    if (drawn & 1) std::this_thread::sleep_for(std::chrono::microseconds((drawn >> 1) % most));
  }
  void misuse(const std::string& what) {
    static const bool verbose = getenv("FAKECUDA_VERBOSE");
    if (verbose) fprintf(stderr, "fakecuda: %s\n", what.c_str());
    Lock lock(mutex);
    if (misuses.size() < 1000) misuses.push_back(what);
  }
  void fail(int error, const std::string& why) { // a kernel or a copy that does what it must not do
    int none = 0;
    if (sticky.compare_exchange_strong(none, error)) misuse("the context is broken: " + why);
  }
  void fail_as_asked(int error) {
    int none = 0;
    sticky.compare_exchange_strong(none, error);
  }
  int called(const char* name) { // count a call; return the error that it shall return
    Lock lock(mutex);
    calls[name]++;
    auto place = refusals.find(name);
    if (place == refusals.end()) return 0;
    Refusal& refusal = place->second;
    if (refusal.after > 0 && refusal.after--) return 0;
    Refusal now = refusal;
    if (now.count && !--refusal.count) refusals.erase(place);
    refused++;
    if (now.breaks) fail_as_asked(now.error);
    return now.error;
  }
};

inline Settings& settings = *new Settings; // never destroyed: threads of streams use it until the process ends

} // namespace fakecuda
