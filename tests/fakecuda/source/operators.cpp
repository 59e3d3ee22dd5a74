// Any operator that torch has a CUDA kernel for, as a task of a stream: torch's kernel for the CPU, on the memory behind
// the device's addresses. The results are allocated at the call, as CUDA's kernels do, with the shapes that torch's meta
// kernel gives them; where it has none, because they depend on values, the call waits for the stream.
#include "tensors.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>

#include <memory>

namespace fakecuda {

void launch(Device device, std::function<void()> run) {
  using Function = std::function<void()>;
  c10::cuda::CUDAGuard guard(device);
  auto stream = c10::cuda::getCurrentCUDAStream(device.index());
  auto call = [](void* data) {
    thread_local bool is_ready = false;
    if (!is_ready) at::set_num_threads(1);
    is_ready = true;
    at::AutoDispatchBelowADInplaceOrView below;
    (*static_cast<Function*>(data))();
  };
  auto release = [](void* data) { delete static_cast<Function*>(data); };
  C10_CUDA_CHECK(static_cast<cudaError_t>(fakecuda_launch(stream.stream(), call, new Function(std::move(run)), release)));
}

at::Tensor seen_by_stream(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  at::Tensor seen;
  if (!is_ours(tensor)) {
    seen = tensor.clone();
  } else {
    auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(c10::kCPU);
    seen = tensor.numel()
        ? at::from_blob(fakecuda_alias(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options)
        : at::empty_strided(tensor.sizes(), tensor.strides(), options);
    seen._set_conj(tensor.is_conj());
    seen._set_neg(tensor.is_neg());
  }
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) seen.unsafeGetTensorImpl()->set_wrapped_number(true);
  return seen;
}

namespace {

at::Tensor seen_by_meta(const at::Tensor& tensor) {
  if (!is_ours(tensor)) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
}

// --- random numbers -------------------------------------------------------------------------------

// Return the state of a CUDA generator at a call; within a graph it is in the device's memory, which each replay sets.
at::PhiloxCudaState drawn_from(const IValue& given, Device device) {
  auto generator = given.isNone() ? at::cuda::detail::getDefaultCUDAGenerator(device.index()) : given.toGenerator();
  auto* ours = at::check_generator<at::CUDAGeneratorImpl>(generator);
  std::lock_guard<std::mutex> lock(ours->mutex_);
  return ours->philox_cuda_state(4);
}

at::Generator generator_of(const at::PhiloxCudaState& state) {
  auto read = [](const int64_t* address) { return *static_cast<uint64_t*>(fakecuda_alias(address)); };
  uint64_t seed = state.captured_ ? read(state.seed_.ptr) : state.seed_.val;
  uint64_t offset = state.captured_ ? read(state.offset_.ptr) + state.offset_intragraph_ : state.offset_.val;
  uint64_t mixed = (seed ^ (offset * 0x9e3779b97f4a7c15)) * 0xbf58476d1ce4e5b9;
  return at::detail::createCPUGenerator(mixed ^ (mixed >> 31));
}

// --- one call -------------------------------------------------------------------------------------

struct Call {
  c10::OperatorHandle op;
  Stack arguments;
  Device device;
  int generator = -1; // its place in the arguments
  at::PhiloxCudaState state;

  Call(const c10::OperatorHandle& op, Stack given);

  const c10::FunctionSchema& schema() const { return op.schema(); }
  std::vector<Device> devices() const;
  std::function<Stack()> kernel() const;
  std::optional<Stack> shapes() const;
  void resize_empty_results() const;
  void count_changes() const;
  const IValue& changed(const c10::AliasInfo& alias) const;
};

Call::Call(const c10::OperatorHandle& op, Stack given)
    : op(op), arguments(std::move(given)), device(c10::kCUDA, c10::cuda::current_device()) {
  bool is_scalars = true; // a scalar may be on another device
  for (size_t at = 0; at < arguments.size(); at++) {
    const auto& value = arguments[at];
    auto look = [&](const at::Tensor& tensor) {
      if (is_ours(tensor) && is_scalars) {
        device = tensor.device();
        is_scalars = !tensor.dim();
      }
      return tensor;
    };
    if (!value.isDevice()) with_tensors(value, c10::kCPU, look);
    else if (value.toDevice().is_cuda() && value.toDevice().has_index()) device = value.toDevice();
    if (schema().arguments()[at].name() == "generator") generator = static_cast<int>(at);
  }
  if (generator >= 0) {
    state = drawn_from(arguments[generator], device);
    arguments[generator] = IValue();
  }
}

// The kernel, to be run in a stream's thread.
std::function<Stack()> Call::kernel() const {
  Stack seen;
  for (const auto& value : arguments) seen.push_back(with_tensors(value, c10::kCPU, seen_by_stream));
  return [op = op, seen, state = state, generator = generator] {
    Stack stack = seen;
    if (generator >= 0) stack[generator] = generator_of(state);
    op.callBoxed(&stack);
    return stack;
  };
}

// The results as meta tensors; none if they depend on values.
std::optional<Stack> Call::shapes() const {
  Stack stack;
  try {
    for (const auto& value : arguments) stack.push_back(with_tensors(value, c10::kMeta, seen_by_meta));
    op.callBoxed(&stack);
  } catch (const std::exception&) {
    return std::nullopt;
  }
  for (const auto& value : stack)
    if (!value.isTensorList() && !(value.isTensor() && (!value.toTensor().defined() || value.toTensor().is_meta())))
      return std::nullopt;
  return stack;
}

// Give empty results the shapes that the kernel would give them: a stream's thread can allocate nothing.
void Call::resize_empty_results() const {
  const auto& declared = schema().arguments();
  auto is_empty = [&](size_t at) {
    return declared[at].is_out() && arguments[at].isTensor() && !arguments[at].toTensor().numel();
  };
  bool is_any = false;
  for (size_t at = 0; at < declared.size(); at++) is_any = is_any || is_empty(at);
  if (!is_any) return;
  Stack stack;
  for (const auto& value : arguments) stack.push_back(with_tensors(value, c10::kMeta, seen_by_meta));
  Stack outs = stack;
  op.callBoxed(&stack);
  for (size_t at = 0; at < declared.size(); at++)
    if (is_empty(at)) arguments[at].toTensor().resize_(outs[at].toTensor().sizes());
}

const IValue& Call::changed(const c10::AliasInfo& alias) const {
  for (size_t at = 0; at < arguments.size(); at++) {
    const auto* own = schema().arguments()[at].alias_info();
    if (own && *own == alias) return arguments[at];
  }
  TORCH_CHECK(false, "the fake device: ", schema().name(), " returns what it was not given");
}

// Torch's CUDA kernels for lists count the changes themselves, when they are launched.
void Call::count_changes() const {
  if (schema().name().rfind("aten::_foreach_", 0) != 0) return;
  for (size_t at = 0; at < arguments.size(); at++) {
    const auto* alias = schema().arguments()[at].alias_info();
    if (alias && alias->isWrite() && arguments[at].isTensorList())
      for (const at::Tensor& tensor : arguments[at].toTensorVector()) tensor.unsafeGetTensorImpl()->bump_version();
  }
}

at::Tensor on_device(const at::Tensor& tensor, Device device) { return tensor.defined() ? tensor.to(device) : tensor; }

// Run the kernel, and wait for its results, as CUDA's kernel does.
void run_and_wait(const Call& call, Stack* stack) {
  auto results = std::make_shared<Stack>();
  launch(call.device, [run = call.kernel(), results] { *results = run(); });
  c10::cuda::stream_synchronize(c10::cuda::getCurrentCUDAStream(call.device.index()));
  for (const auto& value : *results)
    stack->push_back(
        with_tensors(value, call.device, [&](const at::Tensor& tensor) { return on_device(tensor, call.device); }));
}

void write(const IValue& target, const IValue& result) {
  if (target.isNone()) return;
  if (target.isTensor()) {
    if (target.toTensor().defined()) target.toTensor().copy_(result.toTensor());
    return;
  }
  auto to = target.toTensorVector(), from = result.toTensorVector();
  for (size_t part = 0; part < to.size(); part++) to[part].copy_(from[part]);
}

} // namespace

void run_in_stream(const c10::OperatorHandle& op, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  Call call(op, Stack(stack->end() - count, stack->end()));
  c10::cuda::CUDAGuard guard(call.device);
  call.resize_empty_results();
  torch::jit::drop(*stack, count);
  bool has_new = false;
  for (const auto& result : op.schema().returns()) has_new = has_new || !result.alias_info();
  std::optional<Stack> shapes;
  if (has_new) shapes = call.shapes();
  if (has_new && !shapes) return run_and_wait(call, stack);
  Stack targets; // of the results that are new, as the stream's thread sees them
  for (size_t number = 0; number < op.schema().returns().size(); number++) {
    if (const auto* alias = op.schema().returns()[number].alias_info()) {
      stack->push_back(call.changed(*alias));
      targets.emplace_back();
      continue;
    }
    auto made = with_tensors((*shapes)[number], call.device, [&](const at::Tensor& shape) {
      if (!shape.defined()) return shape;
      return at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(call.device));
    });
    targets.push_back(with_tensors(made, c10::kCPU, seen_by_stream));
    stack->push_back(made);
  }
  launch(call.device, [run = call.kernel(), targets] {
    auto results = run();
    for (size_t number = 0; number < targets.size(); number++) write(targets[number], results[number]);
  });
  call.count_changes();
}

void run_on_host(const c10::OperatorHandle& op, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  Stack arguments(stack->end() - count, stack->end());
  torch::jit::drop(*stack, count);
  std::optional<Device> device;
  for (auto& value : arguments)
    value = with_tensors(value, c10::kCPU, [&](const at::Tensor& tensor) {
      if (!is_ours(tensor)) return tensor;
      device = tensor.device();
      return tensor.cpu();
    });
  op.callBoxed(&arguments);
  for (const auto& value : arguments)
    stack->push_back(with_tensors(value, *device, [&](const at::Tensor& tensor) { return on_device(tensor, *device); }));
}

} // namespace fakecuda
