// Ops of the pretend device: each runs at once on the CPU, on aliases of the device's memory, and
// what it reads and writes is noted for the stream that is current.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <torch/library.h>
#include <unordered_map>
#include "memory.h"

namespace rehearsal {

using at::Tensor;
using Storages = std::unordered_map<void*, c10::Storage>;
using Stack = torch::jit::Stack;

inline int64_t num_ops = 0, pageable_copies = 0;

inline bool is_near(const Tensor& t) { return t.defined() && t.device().type() == KIND; }
inline void* place_of(const Tensor& t) { return t.storage().mutable_data(); }

// Whatever happens meanwhile, the current device is the one before again.
struct DeviceKept {
  int before = device_now;
  ~DeviceKept() { device_now = before; }
};

// ---- generators: one per device, so that a seed of the host moves none of them --------------------

inline at::Generator& generator_of(int device) {
  static std::map<int, at::Generator> all;
  auto& made = all[device];
  if (!made.defined()) made = at::detail::createCPUGenerator(c10::default_rng_seed_val);
  return made;
}

// While alive, ops that draw from the CPU's generator draw from that of a device.
struct DeviceRandom {
  Tensor host;
  int device;
  explicit DeviceRandom(int device) : device(device) {
    auto& own = generator_of(device);
    auto shared = at::detail::getDefaultCPUGenerator();
    host = shared.get_state();
    shared.set_state(own.get_state());
  }
  ~DeviceRandom() {
    auto shared = at::detail::getDefaultCPUGenerator();
    generator_of(device).set_state(shared.get_state());
    shared.set_state(host);
  }
};

// ---- aliases ---------------------------------------------------------------------------------------

inline void shape_as(const Tensor& made, const Tensor& given) {
  auto* inside = made.unsafeGetTensorImpl();
  inside->set_sizes_and_strides(given.sizes(), given.strides());
  inside->set_storage_offset(given.storage_offset());
}

// Returns a tensor of the CPU in the same memory.
inline Tensor far_alias(const Tensor& t) {
  if (!is_near(t)) return t;
  c10::DataPtr data(place_of(t), c10::Device(c10::DeviceType::CPU));
  c10::Storage storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(), std::move(data),
                       c10::GetAllocator(c10::DeviceType::CPU), true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  shape_as(made, t);
  if (t.is_conj()) made._set_conj(true);
  if (t.is_neg()) made._set_neg(true);
  return made;
}

// Returns a tensor of the device for what an op of the CPU gave: in memory that `known` has, or new.
inline Tensor near_alias(const Tensor& t, const Storages& known) {
  if (!t.defined() || t.device().type() != c10::DeviceType::CPU) return t;
  auto place = place_of(t);
  auto at = place ? known.find(place) : known.end();
  auto storage = at != known.end() ? at->second : taken_over(t.storage());
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage),
      c10::DispatchKeySet(
          {c10::DispatchKey::REHEARSAL_KEY, c10::DispatchKey::AutogradFunctionality}),
      t.dtype());
  shape_as(made, t);
  return made;
}

// ---- every op that has no function of its own ------------------------------------------------------

inline bool takes_other_devices(const std::string& name) {
  for (auto* part : {"index", "copy", "_to", "set_", "_foreach", "_fused_adam", "tensor_split",
                     "_local"})
    if (name.find(part) != std::string::npos) return true;
  return false;
}

struct Operands {
  Storages known;                                  // memory that came in
  std::vector<std::pair<Tensor, bool>> used;       // whether it is written
  std::vector<std::pair<Tensor, Tensor>> written;  // with its alias
  int device = -1;
  bool is_stray = false, is_several = false;

  Tensor take(const Tensor& t, bool writes) {
    if (!is_near(t)) {
      is_stray |= t.defined() && t.device().type() == c10::DeviceType::CPU && t.dim() > 0;
      return t;
    }
    if (auto place = place_of(t)) known[place] = t.storage();
    used.push_back({t, writes});
    is_several |= device >= 0 && device != t.device().index();
    device = t.device().index();
    auto alias = far_alias(t);
    if (writes) written.push_back({t, alias});
    return alias;
  }

  void take(c10::IValue& value, const c10::Argument& about) {
    auto* alias = about.alias_info();
    bool writes = alias && alias->isWrite();
    if (value.isTensor()) {
      value = take(value.toTensor(), writes);
    } else if (value.isTensorList()) {
      c10::List<Tensor> all;
      for (auto& t : value.toTensorVector()) all.push_back(take(t, writes));
      value = all;
    } else if (value.isList() && value.toListRef().size() &&
               value.toList().elementType()->kind() == c10::TypeKind::OptionalType) {
      c10::List<std::optional<Tensor>> all;
      for (const c10::IValue& each : value.toListRef())
        all.push_back(each.isNone() ? std::optional<Tensor>() : take(each.toTensor(), writes));
      value = all;
    } else if (value.isDevice()) {
      auto asked = value.toDevice();
      if (asked.type() == KIND && asked.has_index()) device = asked.index();
      value = c10::IValue(c10::Device(c10::DeviceType::CPU));
    } else if (about.name() == "pin_memory") {
      value = c10::IValue();
    }
  }

  void check(const std::string& name) const {
    TORCH_CHECK(!is_several || name.find("copy") != std::string::npos, "rehearsal device: ", name,
                ": expected all tensors to be on the same device, but found several of it");
    TORCH_CHECK(used.empty() || !is_stray || takes_other_devices(name), "rehearsal device: ", name,
                ": expected all tensors to be on the same device, but found some on cpu");
  }

  // Gives an output that the op has made larger its memory and shape.
  void keep_resized() {
    for (auto& [t, alias] : written) {
      if (alias.storage().data() != t.storage().data()) {
        auto* storage = t.storage().unsafeGetStorageImpl();
        resize(storage, alias.storage().nbytes());
        memcpy(place_of(t), alias.storage().data(), alias.storage().nbytes());
        if (auto place = place_of(t)) known[place] = t.storage();
      }
      if (alias.sizes() != t.sizes() || alias.strides() != t.strides()) shape_as(t, alias);
    }
  }
};

inline void note_op(const std::string& name, const Operands& operands, const Stack& stack,
                    size_t first) {
  std::lock_guard held(guard);
  ++num_ops;
  auto stream = current_stream();
  count_beside(stream);
  Use now{stream, tick(stream), name};
  for (auto& [t, writes] : operands.used)
    if (t.numel()) note_use_of(place_of(t), now, writes);
  for (size_t i = first; i < stack.size(); i++)
    if (stack[i].isTensor() && is_near(stack[i].toTensor()) &&
        !operands.known.count(place_of(stack[i].toTensor())))
      note_use_of(place_of(stack[i].toTensor()), now, true);
}

// Which argument a result is, where the op returns what it writes; -1: it is none.
inline int argument_of(const c10::FunctionSchema& schema, const c10::Argument& result) {
  auto* alias = result.alias_info();
  if (!alias || !alias->isWrite()) return -1;
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    auto* given = schema.arguments()[i].alias_info();
    if (given && *given == *alias) return int(i);
  }
  return -1;
}

inline void run_on_cpu(const c10::OperatorHandle& op, Stack* stack, int device) {
  if (op.hasTag(at::Tag::nondeterministic_seeded)) {
    DeviceRandom random(device);
    op.callBoxedForDispatchKey(c10::DispatchKey::CPU, *stack);
  } else {
    op.callBoxedForDispatchKey(c10::DispatchKey::CPU, *stack);
  }
}

inline void any_op(const c10::OperatorHandle& op, Stack* stack) {
  auto& schema = op.schema();
  auto& arguments = schema.arguments();
  auto first = stack->size() - arguments.size();
  std::vector<c10::IValue> given(stack->begin() + first, stack->end());
  Operands operands;
  for (size_t i = 0; i < arguments.size(); i++) operands.take((*stack)[first + i], arguments[i]);
  operands.check(schema.name());
  DeviceKept kept;
  if (operands.device >= 0) device_now = operands.device;
  settle_stream(current_stream());
  run_on_cpu(op, stack, device_now);
  operands.keep_resized();
  auto& returns = schema.returns();
  for (size_t i = 0; i < returns.size(); i++) {
    auto& result = (*stack)[first + i];
    if (auto at = argument_of(schema, returns[i]); at >= 0) {
      result = given[at];
    } else if (result.isTensor()) {
      result = near_alias(result.toTensor(), operands.known);
    } else if (result.isTensorList()) {
      c10::List<Tensor> all;
      for (auto& t : result.toTensorVector()) all.push_back(near_alias(t, operands.known));
      result = all;
    }
  }
  auto* alias = returns.empty() ? nullptr : returns[0].alias_info();
  if (!alias || alias->isWrite()) note_op(schema.name(), operands, *stack, first);  // else: a view
}

// ---- ops that a fallback cannot be: who makes memory, who copies, who looks --------------------------

inline Tensor empty(c10::SymIntArrayRef size, std::optional<c10::ScalarType> dtype,
                    std::optional<c10::Layout>, std::optional<c10::Device> device,
                    std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  DeviceKept kept;
  if (device && device->has_index()) device_now = device->index();
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &near_memory,
                                   c10::DispatchKeySet(c10::DispatchKey::REHEARSAL_KEY),
                                   c10::dtype_or_default(dtype), format);
}

inline Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                            std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                            std::optional<c10::Device> device, std::optional<bool>) {
  DeviceKept kept;
  if (device && device->has_index()) device_now = device->index();
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &near_memory,
      c10::DispatchKeySet(c10::DispatchKey::REHEARSAL_KEY), c10::dtype_or_default(dtype));
}

// As on CUDA: a copy that does not wait needs pinned memory on the host's side; one of pageable memory
// to the device is staged by the host, one back to it waits.
inline Tensor& copy(Tensor& to, const Tensor& from, bool non_blocking) {
  DeviceKept kept;
  device_now = (is_near(to) ? to : from).device().index();
  auto stream = current_stream();
  settle_stream(stream);
  far_alias(to).copy_(far_alias(from));
  bool crosses = is_near(to) != is_near(from);
  auto& outside = is_near(to) ? from : to;
  bool pageable = crosses && outside.numel() && !is_pinned(place_of(outside));
  {
    std::lock_guard held(guard);
    ++num_ops;
    count_beside(stream);
    pageable_copies += pageable;
    Use now{stream, tick(stream), "aten::copy_"};
    if (from.numel()) note_use_of(place_of(from), now, false);
    if (to.numel()) note_use_of(place_of(to), now, true);
  }
  if (crosses && (!non_blocking || (pageable && is_near(from)))) host_waits_for_stream(stream);
  return to;
}

inline c10::Scalar item(const Tensor& t) {
  settle_stream(current_stream(t.device().index()));
  host_waits_for_stream(current_stream(t.device().index()));
  return at::_local_scalar_dense(far_alias(t));
}

inline Tensor view_of(const Tensor& t) {
  return at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(t.storage()),
                                                  t.key_set(), t.dtype());
}

inline Tensor as_strided(const Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                         std::optional<c10::SymInt> offset) {
  auto made = view_of(t);
  auto* inside = made.unsafeGetTensorImpl();
  inside->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  inside->set_storage_offset(offset ? offset->expect_int() : t.storage_offset());
  return made;
}

inline Tensor view(const Tensor& t, c10::SymIntArrayRef size) {
  auto made = view_of(t);
  shape_as(made, far_alias(t).view(C10_AS_INTARRAYREF_SLOW(size)));
  return made;
}

inline Tensor& set_storage(Tensor& t, c10::Storage storage, c10::SymInt offset,
                           c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* inside = t.unsafeGetTensorImpl();
  inside->set_storage_keep_dtype(std::move(storage));
  if (stride.empty() && !size.empty())
    inside->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  else
    inside->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  inside->set_storage_offset(offset.expect_int());
  return t;
}

inline Tensor& set_whole_storage(Tensor& t, c10::Storage storage) {
  auto* inside = t.unsafeGetTensorImpl();
  auto count = int64_t(storage.nbytes() / t.element_size());
  inside->set_storage_keep_dtype(std::move(storage));
  inside->set_storage_offset(0);
  inside->set_sizes_contiguous({count});
  return t;
}

inline const Tensor& resize_tensor(const Tensor& t, c10::SymIntArrayRef size,
                                   std::optional<c10::MemoryFormat>) {
  auto* inside = t.unsafeGetTensorImpl();
  inside->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  size_t needed = (inside->storage_offset() + inside->numel()) * t.element_size();
  if (needed > t.storage().nbytes()) resize(t.storage().unsafeGetStorageImpl(), needed);
  return t;
}

inline void note_stream(void* place, Stream stream) {
  std::lock_guard held(guard);
  if (auto* block = block_at(place)) block->recorded.insert(stream);
}

inline void record_stream(Tensor& t, c10::Stream stream) {
  note_stream(place_of(t), stream_on(stream.device_index(), stream.id()));
}

inline int64_t plain_attention(const Tensor&, const Tensor&, const Tensor&,
                               const std::optional<Tensor>&, double, bool, std::optional<double>,
                               bool) {
  return int64_t(sdp::SDPBackend::math);
}

}  // namespace rehearsal

namespace at::native {
#ifdef AS_CUDA
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &rehearsal::plain_attention)
#else
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &rehearsal::plain_attention)
#endif
}  // namespace at::native

TORCH_LIBRARY_IMPL(_, REHEARSAL_KEY, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&rehearsal::any_op>());
}

TORCH_LIBRARY_IMPL(aten, REHEARSAL_KEY, m) {
  m.impl("empty.memory_format", rehearsal::empty);
  m.impl("empty_strided", rehearsal::empty_strided);
  m.impl("copy_", rehearsal::copy);
  m.impl("_local_scalar_dense", rehearsal::item);
  m.impl("as_strided", rehearsal::as_strided);
  m.impl("view", rehearsal::view);
  m.impl("set_.source_Storage_storage_offset", rehearsal::set_storage);
  m.impl("set_.source_Storage", rehearsal::set_whole_storage);
  m.impl("resize_", rehearsal::resize_tensor);
  m.impl("record_stream", rehearsal::record_stream);
  m.impl("_fused_sdp_choice", rehearsal::plain_attention);
}
