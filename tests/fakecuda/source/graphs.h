// Graphs, which are the tasks of a capture.
#pragma once

#include "streams.h"

namespace fakecuda {

struct Graph {
  std::vector<Task> tasks;
};
inline std::mutex graphs_mutex;
inline std::unordered_map<void*, std::shared_ptr<Graph>> graphs; // and executable graphs

inline std::shared_ptr<Graph> graph_of(void* handle) {
  Lock lock(graphs_mutex);
  auto found = graphs.find(handle);
  return found == graphs.end() ? nullptr : found->second;
}

inline void* keep_graph(std::shared_ptr<Graph> graph) {
  Lock lock(graphs_mutex);
  void* handle = new char; // an address of its own
  graphs[handle] = std::move(graph);
  return handle;
}

inline int begin_capture(const StreamPtr& stream, cudaStreamCaptureMode mode) {
  if (stream->is_legacy) return cudaErrorStreamCaptureUnsupported;
  Lock lock(captures_mutex);
  if (stream->capture) return cudaErrorIllegalState;
  auto capture = std::make_shared<Capture>();
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->id = next_capture++;
  stream->capture = capture;
  captures.push_back(capture);
  return 0;
}

inline int end_capture(const StreamPtr& stream, void** graph) {
  if (graph) *graph = nullptr;
  auto capture = capture_of(stream);
  if (!capture) return cudaErrorIllegalState;
  std::vector<StreamPtr> all;
  for (int device = 0; device < kDevices; device++)
    for (auto& each : streams_on(device)) all.push_back(each);
  {
    Lock lock(captures_mutex);
    for (auto& each : all)
      if (each->capture == capture) each->capture = nullptr;
    captures.erase(
        std::remove_if(
            captures.begin(), captures.end(), [&](auto& each) { return each.expired() || each.lock() == capture; }),
        captures.end());
  }
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id())
    return cudaErrorStreamCaptureWrongThread;
  if (capture->invalid) return cudaErrorStreamCaptureInvalidated;
  auto made = std::make_shared<Graph>();
  made->tasks = std::move(capture->tasks);
  if (graph) *graph = keep_graph(made);
  return 0;
}

inline cudaError_t result(int error) { // of the runtime API: it is also the thread's last error
  if (error && error != cudaErrorNotReady) last_error = static_cast<cudaError_t>(error);
  return static_cast<cudaError_t>(error);
}

inline CUresult driver_result(int error) { return static_cast<CUresult>(error); }

} // namespace fakecuda
