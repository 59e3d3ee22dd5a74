// Puts the operators of the fake device in the place of torch's CUDA kernels, when torch loads this library.
//
// What torch does on the host stays torch's own: its allocators, streams, events, graphs, generators, views, copies
// between host and device, .item(). Only launches of kernels are replaced.
#include "tensors.h"

#include <ATen/Context.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/empty_strided_native.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/library.h>

#include <cstdlib>
#include <mutex>
#include <set>

namespace fakecuda {
namespace {

// --- memory ---------------------------------------------------------------------------------------

// Overwrite memory that the allocator may give to the next kernels of its stream, in that stream, as they would.
void overwrite_freed(const c10::CachingDeviceAllocator::TraceEntry& entry) {
  using Action = c10::CachingDeviceAllocator::TraceEntry::Action;
  if (entry.action_ != Action::FREE_COMPLETED || !entry.size_) return;
  auto stream = static_cast<cudaStream_t>(entry.stream_);
  int before = 0;
  cudaGetDevice(&before);
  if (before != entry.device_) cudaSetDevice(entry.device_);
  cudaStreamCaptureStatus status;
  if (cudaStreamIsCapturing(stream, &status) == cudaSuccess && status == cudaStreamCaptureStatusNone)
    fakecuda_poison(stream, reinterpret_cast<void*>(entry.addr_), entry.size_);
  if (before != entry.device_) cudaSetDevice(before);
}

// The allocator keeps a hook only once it has its devices, which it gets when CUDA is used first. CUDA's own allocator,
// cudaMallocAsync, takes no hook.
void watch_allocator() {
  static std::once_flag once;
  std::call_once(once, [] {
    auto* allocator = c10::cuda::CUDACachingAllocator::get();
    if (allocator->initialized() && allocator->name() == "native") allocator->attachAllocatorTraceTracker(overwrite_freed);
  });
}

void check_memory() {
  watch_allocator();
  TORCH_CHECK_WITH(OutOfMemoryError, !fakecuda_called("tensor"), "CUDA out of memory: the test wants it");
}

at::Tensor empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<Device> device,
    std::optional<bool> pin_memory,
    std::optional<at::MemoryFormat> format) {
  at::globalContext().lazyInitDevice(c10::kCUDA);
  check_memory();
  return at::native::empty_cuda(size, dtype, layout, device, pin_memory, format);
}

at::Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<Device> device,
    std::optional<bool> pin_memory) {
  at::globalContext().lazyInitDevice(c10::kCUDA);
  check_memory();
  return at::native::empty_strided_cuda(size, stride, dtype, layout, device, pin_memory);
}

// --- operators with kernels of their own ----------------------------------------------------------

// Copies are torch's own, but for those within the device that need a kernel.
at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  bool is_within = is_ours(self) && is_ours(source) && self.device() == source.device();
  bool is_plain = self.scalar_type() == source.scalar_type() && self.is_contiguous() && source.is_contiguous() &&
      self.sizes() == source.sizes() && self.is_conj() == source.is_conj() && self.is_neg() == source.is_neg();
  if (!is_within || is_plain || self.is_same(source)) return at::native::copy_(self, source, non_blocking);
  if (!self.numel()) return self;
  auto to = seen_by_stream(self), from = seen_by_stream(source.expand(self.sizes()));
  launch(self.device(), [to, from] { to.copy_(from); });
  return self;
}

// Torch's kernel draws from the default generator without naming it.
std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (train && !*train) return {input.clone(), at::ones_like(input, at::kBool)};
  auto mask = at::empty_like(input, at::kBool).bernoulli_(1 - p);
  return {input * mask * (p < 1 ? 1 / (1 - p) : 0), mask};
}

// --- registration ---------------------------------------------------------------------------------

// What torch does on the host, and what is replaced below.
const std::set<std::string> kKept = {
    "aten::empty.memory_format", "aten::empty_strided", "aten::resize_",          "aten::record_stream",
    "aten::_local_scalar_dense", "aten::copy_",         "aten::_pin_memory",      "aten::is_pinned",
    "aten::is_set_to",           "aten::native_dropout", "aten::_efficientzerotensor"};

bool returns_view(const c10::OperatorHandle& op) {
  for (const auto& result : op.schema().returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return true;
  return false;
}

void replace_kernels(torch::Library& library) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
    std::string full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    if (name.name.rfind("aten::", 0) || kKept.count(full) || name.name.rfind("aten::set_", 0) == 0) continue;
    auto op = dispatcher.findSchema(name);
    if (op && !returns_view(*op))
      library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_in_stream>());
  }
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("copy_", copy);
  library.impl("native_dropout", dropout);
  for (const char* name : {"_validate_sparse_coo_tensor_args", "_validate_sparse_compressed_tensor_args"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  // Torch has no kernel of its own for CUDA: one for all devices launches it.
  library.impl("conj_physical_", torch::CppFunction::makeFromBoxedFunction<&run_in_stream>());
}

struct Quiet : c10::WarningHandler { // torch warns of each kernel that is replaced
  void process(const c10::Warning&) override {}
};

[[maybe_unused]] const bool registered = [] {
  at::globalContext().setUserEnabledCuDNN(false);
  static Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  replace_kernels(library);
  std::atexit(fakecuda_end); // before torch's own objects end
  return true;
}();

} // namespace
} // namespace fakecuda
