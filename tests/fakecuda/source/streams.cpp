// The runtime API: streams, events, captures and graphs.
#include "calls.h"

using namespace fakecuda;

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* made, unsigned flags, int priority) {
  CALLED();
  return result(create_stream(reinterpret_cast<void**>(made), flags, priority));
}
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* made, unsigned flags) {
  CALLED();
  return cudaStreamCreateWithPriority(made, flags, 0);
}
EXPORT cudaError_t cudaStreamCreate(cudaStream_t* made) {
  CALLED();
  return cudaStreamCreateWithPriority(made, 0, 0);
}
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t handle) { CALLED(); return result(destroy_stream(handle)); }
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  CALLED();
  STREAM(stream, handle);
  return *priority = stream->priority, cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned* flags) {
  CALLED();
  STREAM(stream, handle);
  return *flags = stream->flags, cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetId(cudaStream_t handle, unsigned long long* id) {
  CALLED();
  STREAM(stream, handle);
  return *id = stream->id, cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetDevice(cudaStream_t handle, int* device) {
  CALLED();
  STREAM(stream, handle);
  return *device = stream->device, cudaSuccess;
}
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  CALLED();
  if (int failed = use_context(); failed && failed != settings.sticky) return result(failed);
  STREAM(stream, handle);
  return result(synchronise(stream));
}
EXPORT cudaError_t cudaStreamQuery(cudaStream_t handle) {
  CALLED();
  CONTEXT();
  STREAM(stream, handle);
  if (auto capture = capture_of(stream)) {
    invalidate(capture, cudaErrorStreamCaptureUnsupported);
    return result(cudaErrorStreamCaptureUnsupported);
  }
  UNSAFE();
  return stream->is_idle() ? cudaSuccess : cudaErrorNotReady;
}
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned) {
  CALLED();
  CONTEXT();
  STREAM(stream, handle);
  EVENT(event, event_handle);
  return result(wait_for(stream, event));
}
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  CALLED();
  CONTEXT();
  STREAM(stream, handle);
  return result(enqueue(stream, {KERNEL, [=] { function(data); }}));
}
EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t function, void* data, unsigned) {
  CALLED();
  CONTEXT();
  STREAM(stream, handle);
  return result(enqueue(stream, {KERNEL, [=] { function(handle, cudaSuccess, data); }}));
}
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* made, unsigned flags) {
  CALLED();
  CONTEXT();
  auto event = std::make_shared<Event>(current_device, flags);
  Lock lock(events_mutex);
  events[event.get()] = event;
  *made = reinterpret_cast<cudaEvent_t>(event.get());
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t* made) { CALLED(); return cudaEventCreateWithFlags(made, 0); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  CALLED();
  Lock lock(events_mutex);
  return events.erase(handle) ? cudaSuccess : result(cudaErrorInvalidResourceHandle);
}
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event_handle, cudaStream_t handle, unsigned) {
  CALLED();
  CONTEXT();
  EVENT(event, event_handle);
  STREAM(stream, handle);
  return result(record(event, stream));
}
EXPORT cudaError_t cudaEventRecord(cudaEvent_t event_handle, cudaStream_t handle) {
  CALLED();
  return cudaEventRecordWithFlags(event_handle, handle, 0);
}
EXPORT cudaError_t cudaEventQuery(cudaEvent_t handle) {
  CALLED();
  CONTEXT();
  EVENT(event, handle);
  UNSAFE();
  Lock lock(event->mutex);
  if (event->capture) {
    invalidate(event->capture, cudaErrorStreamCaptureUnsupported);
    return result(cudaErrorCapturedEvent);
  }
  return !event->moment || event->moment->reached() ? cudaSuccess : cudaErrorNotReady;
}
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  CALLED();
  // Also in a broken context: copies are in flight until the stream is past them.
  if (int failed = use_context(); failed && failed != settings.sticky) return result(failed);
  EVENT(event, handle);
  UNSAFE();
  MomentPtr moment;
  {
    Lock lock(event->mutex);
    if (event->capture) {
      invalidate(event->capture, cudaErrorStreamCaptureUnsupported);
      return result(cudaErrorCapturedEvent);
    }
    moment = event->moment;
  }
  if (moment) moment->wait();
  return result(settings.sticky);
}
EXPORT cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t first, cudaEvent_t last) {
  CALLED();
  EVENT(begin, first);
  EVENT(end, last);
  if ((begin->flags | end->flags) & cudaEventDisableTiming || !begin->moment || !end->moment)
    return result(cudaErrorInvalidResourceHandle);
  if (!begin->moment->reached() || !end->moment->reached()) return cudaErrorNotReady;
  *ms = std::chrono::duration<float, std::milli>(end->moment->at - begin->moment->at).count();
  return cudaSuccess;
}


EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  CALLED();
  std::swap(*mode, interaction);
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  CALLED();
  CONTEXT();
  STREAM(stream, handle);
  return result(begin_capture(stream, mode));
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  CALLED();
  STREAM(stream, handle);
  return result(end_capture(stream, reinterpret_cast<void**>(graph)));
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  CALLED();
  STREAM(stream, handle);
  auto capture = capture_of(stream);
  *status = !capture ? cudaStreamCaptureStatusNone
      : capture->invalid ? cudaStreamCaptureStatusInvalidated
                         : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t handle,
    cudaStreamCaptureStatus* status,
    unsigned long long* id,
    cudaGraph_t* graph,
    const cudaGraphNode_t** nodes,
    const cudaGraphEdgeData** edges,
    size_t* count) {
  CALLED();
  STREAM(stream, handle);
  cudaStreamIsCapturing(handle, status);
  auto capture = capture_of(stream);
  if (id) *id = capture ? capture->id : 0;
  if (graph) *graph = nullptr;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  CALLED();
  auto found = graph_of(graph);
  if (!found) return result(cudaErrorInvalidValue);
  *made = reinterpret_cast<cudaGraphExec_t>(keep_graph(std::make_shared<Graph>(*found)));
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long flags) {
  CALLED();
  return cudaGraphInstantiate(made, graph, flags);
}
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t handle) {
  CALLED();
  CONTEXT();
  STREAM(stream, handle);
  auto found = graph_of(graph);
  if (!found) return result(cudaErrorInvalidValue);
  for (auto& task : found->tasks)
    if (int error = enqueue(stream, task)) return result(error);
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { CALLED(); return cudaSuccess; }
EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  CALLED();
  Lock lock(graphs_mutex);
  return graphs.erase(graph) ? cudaSuccess : cudaErrorInvalidValue;
}
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  CALLED();
  Lock lock(graphs_mutex);
  return graphs.erase(graph) ? cudaSuccess : cudaErrorInvalidValue;
}
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  CALLED();
  auto found = graph_of(graph);
  if (!found) return result(cudaErrorInvalidValue);
  if (nodes) return result(cudaErrorNotSupported);
  return *count = found->tasks.size(), cudaSuccess;
}
EXPORT cudaError_t cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned) { CALLED(); return cudaSuccess; }
