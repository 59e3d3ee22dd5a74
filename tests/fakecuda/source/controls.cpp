// What tests set, and how kernels are launched; device.py calls it.
#include "calls.h"

using namespace fakecuda;

static thread_local int64_t launch_delay_us = 0; // that the host's part of a launch takes at most

// Run a host function as a kernel of a stream; `release` ends its data once, also if it never runs.
EXPORT int fakecuda_launch(void* handle, void (*run)(void*), void* data, void (*release)(void*)) {
  std::shared_ptr<void> kept(data, release);
  if (int error = use_context()) return error;
  auto stream = stream_of(handle);
  if (!stream) return cudaErrorInvalidResourceHandle;
  int error = enqueue(stream, {KERNEL, [run, kept] { run(kept.get()); }});
  if (launch_delay_us > 0)
    std::this_thread::sleep_for(std::chrono::microseconds(settings.next_random() % launch_delay_us));
  return error;
}
// Overwrite memory that its owner has freed; not counted as a kernel, nor delayed.
EXPORT void fakecuda_poison(void* handle, void* address, size_t nbytes) {
  auto stream = stream_of(handle);
  if (!stream || settings.sticky || !is_allocated(address, nbytes)) return;
  char* at = alias_of(address);
  stream->push({KERNEL, [at, nbytes] { memset(at, 0xDB, nbytes); }, true});
}
// What a library without content calls: see make.py.
EXPORT void fakecuda_missing(const char* name) {
  fprintf(stderr, "fakecuda: there is no %s here\n", name);
  abort();
}
// Where a stream's thread finds memory; of a tensor that has none any more, somewhere else. CUDA would break the
// context, and torch then end the process.
EXPORT void* fakecuda_alias(const void* address) {
  if (char* found = alias_of(address)) return found;
  static char* nowhere = map(kPlainBytes, PROT_READ | PROT_WRITE);
  settings.misuse("a kernel was given memory that is not the device's");
  return nowhere;
}
EXPORT void fakecuda_break(int error) { settings.fail_as_asked(error); }
EXPORT void fakecuda_end() { // at the process's end: what kernels use is about to be destroyed
  {
    Lock lock(settings.mutex);
    ending = true;
    settings.changed.notify_all();
  }
  if (owner == getpid())
    for (int waits = 0; running && waits < 5000; waits++) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}
EXPORT void fakecuda_set_seed(uint64_t seed) { settings.random = seed; }
EXPORT void fakecuda_delay(int kind, int64_t most_us) { settings.delay_us[kind] = most_us; }
EXPORT void fakecuda_hold(int kind, int holds) {
  Lock lock(settings.mutex);
  if (holds)
    settings.held.insert(kind);
  else
    settings.held.erase(kind);
  settings.changed.notify_all();
}
EXPORT void fakecuda_hold_stream(void* handle, int holds) {
  auto stream = stream_of(handle);
  Lock lock(settings.mutex);
  if (holds)
    settings.held_streams.insert(stream.get());
  else
    settings.held_streams.erase(stream.get());
  settings.changed.notify_all();
}
EXPORT void fakecuda_launch_delay(int64_t most_us) { launch_delay_us = most_us; }
EXPORT void fakecuda_fault(int kind, int64_t after, int error) {
  settings.fault[kind] = error;
  settings.fault_after[kind] = after;
}
EXPORT void fakecuda_refuse(const char* name, int64_t after, int64_t count, int error, int breaks) {
  Lock lock(settings.mutex);
  settings.refusals.erase(name);
  if (error) settings.refusals[name] = {after, count, error, breaks != 0};
}
EXPORT int fakecuda_called(const char* name) { return settings.called(name); } // what is no call of CUDA's
EXPORT int64_t fakecuda_refused() {
  Lock lock(settings.mutex);
  return settings.refused;
}
EXPORT int fakecuda_calls(char* text, int size) { // a line for each name
  Lock lock(settings.mutex);
  std::string all;
  for (auto& [name, count] : settings.calls) all += name + " " + std::to_string(count) + "\n";
  return snprintf(text, size, "%s", all.c_str());
}
EXPORT int64_t fakecuda_count(int kind) { return settings.counts[kind]; }
EXPORT int64_t fakecuda_bytes(int kind) { return settings.bytes[kind]; }
EXPORT int fakecuda_registered() {
  Lock lock(registered_mutex);
  return static_cast<int>(registered.size());
}
EXPORT int fakecuda_registered_by_program() { // not allocated by CUDA
  Lock lock(registered_mutex);
  int count = 0;
  for (auto& each : registered) count += !each.second.is_owned;
  return count;
}
EXPORT int fakecuda_misuses(char* text, int size) {
  Lock lock(settings.mutex);
  std::string all;
  for (auto& each : settings.misuses) all += each + "\n";
  if (text) snprintf(text, size, "%s", all.c_str());
  int count = static_cast<int>(settings.misuses.size());
  settings.misuses.clear();
  return count;
}
EXPORT void fakecuda_reset() { // drop faults, delays, holds, and even the broken context
  for (int kind = 0; kind < KINDS; kind++) settings.delay_us[kind] = settings.fault_after[kind] = 0;
  {
    Lock lock(settings.mutex);
    settings.refusals.clear();
    settings.held.clear();
    settings.held_streams.clear();
    settings.changed.notify_all();
  }
  launch_delay_us = 0;
  for (int device = 0; device < kDevices; device++)
    for (auto& stream : streams_on(device)) stream->wait_idle();
  settings.sticky = 0;
}
