// Streams, which are threads; events; captures of graphs.
#pragma once

#include "settings.h"

namespace fakecuda {

struct Task {
  Kind kind;
  std::function<void()> run;
  bool is_control = false; // an event or a wait: goes on whatever has failed
};

struct Capture {
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  unsigned long long id;
  std::vector<Task> tasks; // in the order of the calls, which is one of the graph's orders
  std::atomic<int> invalid{0};
};
using CapturePtr = std::shared_ptr<Capture>;

struct Moment { // of an event, or of a stream
  std::mutex mutex;
  std::condition_variable changed;
  bool is_reached = false;
  Clock::time_point at;
  void reach() {
    Lock lock(mutex);
    is_reached = true;
    at = Clock::now();
    changed.notify_all();
  }
  void wait() {
    Lock lock(mutex);
    changed.wait(lock, [&] { return is_reached; });
  }
  bool reached() {
    Lock lock(mutex);
    return is_reached;
  }
};
using MomentPtr = std::shared_ptr<Moment>;

inline std::atomic<bool> ending{false};
inline std::atomic<int> running{0};

struct Stream : std::enable_shared_from_this<Stream> {
  const int device;
  const unsigned flags;
  const int priority;
  const bool is_legacy;
  const unsigned long long id;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Task> tasks;
  uint64_t issued = 0, done = 0;
  bool has_thread = false, is_destroyed = false;
  CapturePtr capture; // guarded by captures_mutex

  static std::atomic<unsigned long long> next_id;

  Stream(int device, unsigned flags, int priority, bool is_legacy)
      : device(device), flags(flags), priority(priority), is_legacy(is_legacy), id(next_id++) {}

  bool is_blocking() const { return !(flags & cudaStreamNonBlocking); }

  void push(Task task) {
    Lock lock(mutex);
    tasks.push_back(std::move(task));
    issued++;
    if (!has_thread) {
      has_thread = true;
      std::thread([self = shared_from_this()] { self->work(); }).detach();
    }
    changed.notify_all();
  }

  void wait_idle() {
    Lock lock(mutex);
    uint64_t wanted = issued;
    changed.wait(lock, [&] { return done >= wanted; });
  }

  bool is_idle() {
    Lock lock(mutex);
    return done == issued;
  }

  void work() {
    pthread_setname_np(pthread_self(), "fakecuda");
    for (;;) {
      Task task;
      {
        Lock lock(mutex);
        changed.wait(lock, [&] { return !tasks.empty() || is_destroyed; });
        if (tasks.empty()) return;
        task = std::move(tasks.front());
        tasks.pop_front();
      }
      execute(task);
      task = {}; // what it holds ends before anybody sees that it is done
      Lock lock(mutex);
      done++;
      changed.notify_all();
    }
  }

  void execute(Task& task) {
    if (ending) return;
    if (task.is_control) return task.run();
    {
      Lock lock(settings.mutex);
      settings.changed.wait(lock, [&] { return ending || !(settings.held.count(task.kind) || settings.held_streams.count(this)); });
    }
    struct Running {
      Running() { running++; }
      ~Running() { running--; }
    } now;
    if (ending) return;
    settings.delay(task.kind);
    if (settings.fault_after[task.kind] > 0 && --settings.fault_after[task.kind] == 0)
      settings.fail_as_asked(settings.fault[task.kind]);
    if (settings.sticky) return;
    try {
      task.run();
    } catch (const std::exception& exc) {
      settings.fail(cudaErrorAssert, exc.what());
    }
  }
};
inline std::atomic<unsigned long long> Stream::next_id{1};
using StreamPtr = std::shared_ptr<Stream>;

struct Event {
  const int device;
  const unsigned flags;
  std::mutex mutex;
  MomentPtr moment; // of the last record; null: never recorded
  CapturePtr capture; // in which it was recorded
  Event(int device, unsigned flags) : device(device), flags(flags) {}
};
using EventPtr = std::shared_ptr<Event>;

inline std::mutex streams_mutex, events_mutex, captures_mutex;
inline std::unordered_map<void*, StreamPtr> streams;
inline std::unordered_map<void*, EventPtr> events;
inline StreamPtr legacy_streams[kMostDevices], thread_streams[kMostDevices];
inline std::vector<std::weak_ptr<Capture>> captures; // in progress
inline std::atomic<unsigned long long> next_capture{1};

inline thread_local int current_device = 0;
inline thread_local cudaStreamCaptureMode interaction = cudaStreamCaptureModeGlobal;
inline thread_local cudaError_t last_error = cudaSuccess;

inline std::atomic<pid_t> owner{0}; // the process that has initialised the driver
inline std::atomic<bool> active[kMostDevices] = {}; // primary contexts

inline int initialise() {
  pid_t none = 0;
  if (owner.compare_exchange_strong(none, getpid())) return 0;
  return owner == getpid() ? 0 : cudaErrorInitializationError; // a forked child can't use its parent's device
}

// The current device's context, which most calls create.
inline int use_context() {
  if (!kDevices) return cudaErrorNoDevice;
  if (int error = initialise()) return error;
  active[current_device] = true;
  return settings.sticky;
}

inline StreamPtr of_device(StreamPtr (&kept)[kMostDevices], int device, unsigned flags, bool is_legacy) {
  Lock lock(streams_mutex);
  if (!kept[device]) kept[device] = std::make_shared<Stream>(device, flags, 0, is_legacy);
  return kept[device];
}

inline StreamPtr stream_of(void* handle) {
  if (!handle || handle == cudaStreamLegacy) return of_device(legacy_streams, current_device, 0, true);
  if (handle == cudaStreamPerThread) return of_device(thread_streams, current_device, 0, false);
  Lock lock(streams_mutex);
  auto found = streams.find(handle);
  return found == streams.end() ? nullptr : found->second;
}

inline EventPtr event_of(void* handle) {
  Lock lock(events_mutex);
  auto found = events.find(handle);
  return found == events.end() ? nullptr : found->second;
}

inline std::vector<StreamPtr> streams_on(int device) {
  Lock lock(streams_mutex);
  std::vector<StreamPtr> found;
  for (auto* kept : {&legacy_streams, &thread_streams})
    if ((*kept)[device]) found.push_back((*kept)[device]);
  for (auto& each : streams)
    if (each.second->device == device) found.push_back(each.second);
  return found;
}

inline CapturePtr capture_of(const StreamPtr& stream) {
  Lock lock(captures_mutex);
  return stream->capture;
}

inline void invalidate(const CapturePtr& capture, int error) {
  int none = 0;
  if (capture) capture->invalid.compare_exchange_strong(none, error);
}

// A call that is unsafe during captures: it fails, and the capture with it, as CUDA's documentation of
// cudaThreadExchangeStreamCaptureMode says.
inline int unsafe_call() {
  if (interaction == cudaStreamCaptureModeRelaxed) return 0;
  Lock lock(captures_mutex);
  int error = 0;
  for (auto& each : captures) {
    auto capture = each.lock();
    if (!capture || capture->mode == cudaStreamCaptureModeRelaxed) continue;
    bool is_mine = capture->thread == std::this_thread::get_id();
    bool forbids = is_mine || (interaction == cudaStreamCaptureModeGlobal && capture->mode == cudaStreamCaptureModeGlobal);
    if (!forbids) continue;
    invalidate(capture, cudaErrorStreamCaptureUnsupported);
    error = cudaErrorStreamCaptureUnsupported;
  }
  return error;
}

inline MomentPtr moment_of(const StreamPtr& stream) { // the end of what it has now
  auto moment = std::make_shared<Moment>();
  stream->push({KERNEL, [moment] { moment->reach(); }, true});
  return moment;
}

// The legacy default stream waits for all blocking streams of its device, and they for it.
inline void order_with_legacy(const StreamPtr& stream) {
  if (!stream->is_legacy && !stream->is_blocking()) return;
  for (auto& other : streams_on(stream->device)) {
    if (other == stream || !(stream->is_legacy ? other->is_blocking() : other->is_legacy) || other->is_idle()) continue;
    auto moment = moment_of(other);
    stream->push({KERNEL, [moment] { moment->wait(); }, true});
  }
}

inline int enqueue(const StreamPtr& stream, Task task, size_t bytes = 0) {
  if (int error = settings.sticky) return error;
  settings.counts[task.kind]++;
  settings.bytes[task.kind] += bytes;
  if (auto capture = capture_of(stream)) {
    if (capture->invalid) return cudaErrorStreamCaptureInvalidated;
    Lock lock(captures_mutex);
    capture->tasks.push_back(std::move(task));
    return 0;
  }
  order_with_legacy(stream);
  stream->push(std::move(task));
  return 0;
}

inline int record(const EventPtr& event, const StreamPtr& stream) {
  if (int error = settings.sticky) return error;
  if (event->device != stream->device) return cudaErrorInvalidResourceHandle;
  if (auto capture = capture_of(stream)) {
    Lock lock(event->mutex);
    event->capture = capture;
    event->moment = nullptr;
    return capture->invalid ? cudaErrorStreamCaptureInvalidated : 0;
  }
  order_with_legacy(stream);
  auto moment = std::make_shared<Moment>();
  {
    Lock lock(event->mutex);
    event->capture = nullptr;
    event->moment = moment;
  }
  stream->push({KERNEL, [moment] { moment->reach(); }, true});
  return 0;
}

inline int wait_for(const StreamPtr& stream, const EventPtr& event) {
  if (int error = settings.sticky) return error;
  MomentPtr moment;
  CapturePtr recorded;
  {
    Lock lock(event->mutex);
    moment = event->moment;
    recorded = event->capture;
  }
  auto capture = capture_of(stream);
  if (recorded) {
    bool in_progress = false;
    {
      Lock lock(captures_mutex);
      for (auto& each : captures) in_progress = in_progress || each.lock() == recorded;
    }
    if (!in_progress) return 0; // of a capture that has ended
    if (capture && capture != recorded) {
      invalidate(capture, cudaErrorStreamCaptureMerge);
      return cudaErrorStreamCaptureMerge;
    }
    Lock lock(captures_mutex);
    stream->capture = recorded; // it joins the capture
    return recorded->invalid ? cudaErrorStreamCaptureInvalidated : 0;
  }
  if (!moment) return 0;
  if (capture) {
    invalidate(capture, cudaErrorStreamCaptureIsolation);
    return cudaErrorStreamCaptureIsolation;
  }
  stream->push({KERNEL, [moment] { moment->wait(); }, true});
  return 0;
}

inline int synchronise(const StreamPtr& stream) {
  if (auto capture = capture_of(stream)) {
    invalidate(capture, cudaErrorStreamCaptureUnsupported);
    return cudaErrorStreamCaptureUnsupported;
  }
  if (int error = unsafe_call()) return error;
  if (stream->is_legacy) order_with_legacy(stream);
  stream->wait_idle();
  return settings.sticky;
}

inline int synchronise_device(int device) {
  if (int error = unsafe_call()) return error;
  for (auto& stream : streams_on(device)) stream->wait_idle();
  return settings.sticky;
}

} // namespace fakecuda
