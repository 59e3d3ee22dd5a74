// Tensors of the fake device as its streams' threads see them, and launches of host functions as kernels.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <functional>

extern "C" {
int fakecuda_launch(void* stream, void (*run)(void*), void* data, void (*release)(void*));
int fakecuda_called(const char* name);
void* fakecuda_alias(const void* address);
void fakecuda_poison(void* stream, void* address, size_t nbytes);
void fakecuda_end();
}

namespace fakecuda {

using c10::Device;
using c10::IValue;
using Stack = torch::jit::Stack;

inline bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.is_cuda(); }

// Run a host function as a kernel of the current stream of a device.
void launch(Device device, std::function<void()> run);

// Return the tensor as a stream's thread sees it. One in host memory is copied: the caller may free it.
at::Tensor seen_by_stream(const at::Tensor& tensor);

// Run an operator's CPU kernel in the thread of the current stream.
void run_in_stream(const c10::OperatorHandle& op, Stack* stack);

// Run an operator that looks at values, and raises: on the host, with copies.
void run_on_host(const c10::OperatorHandle& op, Stack* stack);

// Return a value with its tensors, those in lists included, replaced.
template <class Map>
IValue with_tensors(const IValue& value, Device device, Map map) {
  if (value.isTensor()) return map(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(map(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::make_optional(map(*tensor)) : std::nullopt);
    return list;
  }
  return value.isDevice() ? IValue(device) : value;
}

} // namespace fakecuda
