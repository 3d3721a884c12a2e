// Operators on CUDA tensors: checked as CUDA's are, then done by the CPU's kernels on the same memory.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <map>
#include <unordered_map>
#include <unordered_set>

#include "runtime.h"

namespace pretended {
using at::Tensor;
using c10::IValue;
using Stack = torch::jit::Stack;

inline const c10::DispatchKeySet CPU_KEYS{c10::DispatchKey::CPU};
inline const c10::DispatchKeySet CUDA_KEYS{c10::DispatchKey::CUDA};

inline Tensor tensor_of(c10::Storage storage, c10::DispatchKeySet keys, const Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (like.is_conj()) made._set_conj(true);
  if (like.is_neg()) made._set_neg(true);
  return made;
}

// Memory that is about to be written to. What shares it until then keeps what was there.
inline void* written(const c10::Storage& storage) {
  OnDevice on(storage.device());
  return storage.mutable_data();
}
inline c10::DataPtr on_host(const void* data, std::function<void(void*)> keep) {
  return c10::InefficientStdFunctionContext::makeDataPtr(const_cast<void*>(data), std::move(keep), c10::Device(c10::kCPU));
}

// CPU tensors on the memory of CUDA tensors, and the way back, for one operator. What it writes to is `written` before.
class Aliases {
 public:
  Tensor of(const Tensor& given) {
    if (!given.defined() || !given.is_cuda()) return given;
    device = given.device();
    auto made = tensor_of(storage(given.storage()), CPU_KEYS, given);
    tensors_.emplace(made.unsafeGetTensorImpl(), given);
    kept_.push_back(made);
    return made;
  }
  Tensor back(const Tensor& given) {
    if (!given.defined() || !given.is_cpu()) return given;
    if (auto known = tensors_.find(given.unsafeGetTensorImpl()); known != tensors_.end()) return known->second;
    auto* key = given.storage().unsafeGetStorageImpl();
    auto known = originals_.find(key);
    if (known == originals_.end()) known = originals_.emplace(key, adopt(given.storage())).first;
    kept_.push_back(given);
    return tensor_of(known->second, CUDA_KEYS, given);
  }
  // What kernels did to sizes and memory of the tensors they were given (out= of the wrong size).
  void update() {
    for (auto& made : kept_) {
      auto known = tensors_.find(made.unsafeGetTensorImpl());
      if (known == tensors_.end()) continue;
      auto* original = known->second.unsafeGetTensorImpl();
      auto& storage = original->unsafe_storage();
      if (made.storage().data() != storage.data()) {
        auto adopted = adopt(made.storage());
        storage.set_nbytes(adopted.nbytes());
        storage.set_data_ptr_noswap(std::move(adopted.mutable_data_ptr()));
      }
      if (made.sizes() != original->sizes() || made.strides() != original->strides())
        original->set_sizes_and_strides(made.sizes(), made.strides(), made.storage_offset());
    }
  }
  std::optional<c10::Device> device;

 private:
  c10::Storage storage(const c10::Storage& given) {
    auto& alias = storages_[given.unsafeGetStorageImpl()];
    if (!alias) {
      auto keep = given;
      alias = c10::Storage(c10::Storage::use_byte_size_t(), given.nbytes(), on_host(given.data(), [keep](void*) {}),
                           c10::GetCPUAllocator(), true);
      originals_.emplace(alias.unsafeGetStorageImpl(), given);
    }
    return alias;
  }
  c10::Storage adopt(const c10::Storage& given) {
    auto bytes = static_cast<int64_t>(given.nbytes());
    int index = device && device->has_index() ? device->index() : current_device;
    return {c10::Storage::use_byte_size_t(), given.nbytes(), block(index, bytes, bytes ? given : c10::Storage()), &allocator, true};
  }
  std::unordered_map<const c10::StorageImpl*, c10::Storage> storages_, originals_;
  std::unordered_map<const c10::TensorImpl*, Tensor> tensors_;
  std::vector<Tensor> kept_;
};

inline Tensor as_cpu(const Tensor& given) {
  if (!given.defined() || !given.is_cuda()) return given;
  auto keep = given;
  return tensor_of({c10::Storage::use_byte_size_t(), given.storage().nbytes(), on_host(given.storage().data(), [keep](void*) {})},
                   CPU_KEYS, given);
}
inline Tensor as_cpu_to_write(const Tensor& given) {
  if (given.defined() && given.is_cuda()) written(given.storage());
  return as_cpu(given);
}

// --- Memory ---------------------------------------------------------------------------------------------------------
inline Tensor empty_memory_format(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                                  std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  OnDevice on(device);
  return at::detail::empty_generic(size, &allocator, CUDA_KEYS, c10::dtype_or_default(dtype), format);
}
inline Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  OnDevice on(device);
  return at::detail::empty_strided_generic(size, stride, &allocator, CUDA_KEYS, c10::dtype_or_default(dtype));
}
inline void resize_storage(const c10::Storage& storage, int64_t bytes) {
  auto fresh = block(storage.device().index(), bytes);
  if (auto both = std::min<size_t>(bytes, storage.nbytes())) std::memcpy(fresh.mutable_get(), storage.data(), both);
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(bytes);
}
inline const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  size_t needed = (impl->storage_offset() + impl->numel()) * self.dtype().itemsize();
  if (needed > self.storage().nbytes()) resize_storage(self.storage(), static_cast<int64_t>(needed));
  return self;
}
inline Tensor& set_storage_(Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(size, stride, offset);
  return self;
}
inline Tensor& set_source_(Tensor& self, at::Storage source) {
  int64_t count = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage_(self, std::move(source), 0, {count}, {1});
}
inline Tensor& set_tensor_(Tensor& self, const Tensor& source) {
  return set_storage_(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
inline Tensor& set_empty_(Tensor& self) {
  OnDevice on(self.device());
  return set_storage_(self, {c10::Storage::use_byte_size_t(), 0, allocator.allocate(0), &allocator, true}, 0, {0}, {1});
}

// --- Copies ---------------------------------------------------------------------------------------------------------
inline Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (!self.numel()) return self;  // as on CUDA, which copies nothing then
  ++counters.kernels;
  if (source.is_cuda() && !self.is_cuda() && !(non_blocking && is_pinned(self.const_data_ptr()))) ++counters.reads;
  if (!source.is_cuda() && self.is_cuda()) {
    bool from_pinned = is_pinned(source.const_data_ptr());
    ++counters.uploads;
    if (!non_blocking) ++counters.blocking_uploads;
    if (!from_pinned) ++counters.pageable_uploads;
  }
  as_cpu_to_write(self).copy_(as_cpu(source));
  return self;
}
inline Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  Tensor target = to;
  return copy_(target, self, non_blocking);
}
inline Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  if (to.sizes() != self.sizes()) resize_(to, self.sizes(), std::nullopt);
  return copy_from(self, to, false);
}
inline at::Scalar local_scalar_dense(const Tensor& self) {
  ++counters.reads;
  return as_cpu(self).item();
}

// --- Everything else ------------------------------------------------------------------------------------------------
using Names = std::unordered_set<std::string>;
// Of which CUDA's kernels take indices, or figures, of the host.
inline const Names MAY_MIX{"aten::index.Tensor", "aten::index.Tensor_out", "aten::index_put_", "aten::index_put",
                           "aten::_index_put_impl_", "aten::_unsafe_index.Tensor", "aten::_fused_adamw_", "aten::_fused_adam_",
                           "aten::_fused_sgd_", "aten::_pack_padded_sequence"};
// Which take a number of the host as a tensor though they aren't computed element by element.
inline const Names MAY_TAKE_NUMBERS{"aten::fill_.Tensor", "aten::masked_fill_.Tensor", "aten::index_fill_.int_Tensor",
                                    "aten::masked_fill.Tensor", "aten::index_fill.int_Tensor", "aten::isin.Tensor_Tensor_out"};
// Whose kernels read what they computed to know a size or an answer.
inline const Names READING{"aten::nonzero", "aten::nonzero.out", "aten::equal", "aten::is_nonzero", "aten::_unique2",
                           "aten::unique_dim", "aten::unique_consecutive", "aten::masked_select", "aten::masked_select.out",
                           "aten::repeat_interleave.Tensor", "aten::bincount", "aten::histc", "aten::embedding_renorm_",
                           "aten::linalg_eig", "aten::_linalg_check_errors"};
// Which turns masks and indices of the host into indices itself; others do so by operators that are seen.
inline const char* const WRITING = "aten::_index_put_impl_";

inline std::string name_of(const c10::OperatorHandle& op) {
  auto& name = op.operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

template <typename Visit>
void for_each_tensor(const IValue& value, Visit visit) {
  if (value.isTensor()) visit(value.toTensor());
  else if (value.isTensorList()) for (const Tensor& tensor : value.toTensorVector()) visit(tensor);
  else if (value.isOptionalTensorList()) {
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorList()) if (tensor) visit(*tensor);
  }
}

inline void check_devices(const c10::OperatorHandle& op, const std::string& name, c10::ArrayRef<IValue> arguments) {
  if (MAY_MIX.count(name)) return;
  std::optional<c10::Device> device;
  bool has_host_tensor = false, has_host_number = false;
  auto refuse = [&](const std::string& other) {
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", device->str(), " and ",
                other, "! (when checking ", name, ")");
  };
  for (const auto& value : arguments) for_each_tensor(value, [&](const Tensor& tensor) {
    if (!tensor.defined()) return;
    if (tensor.is_cuda()) {
      if (device && *device != tensor.device()) refuse(tensor.device().str());
      device = tensor.device();
    } else if (tensor.is_cpu() && !tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      (tensor.dim() ? has_host_tensor : has_host_number) = true;
    }
  });
  bool takes_numbers = op.hasTag(at::Tag::pointwise) || MAY_TAKE_NUMBERS.count(name) || name.rfind("aten::_foreach_", 0) == 0;
  if (device && (has_host_tensor || (has_host_number && !takes_numbers))) refuse("cpu");
}

inline void count_reads(const std::string& name, c10::ArrayRef<IValue> arguments) {
  if (READING.count(name)) ++counters.reads;
  if (name == WRITING) {
    for (const auto& value : arguments) if (!value.isTensor()) for_each_tensor(value, [](const Tensor& index) {
      if (!index.defined()) return;
      if (index.is_cuda() && (index.scalar_type() == at::kBool || index.scalar_type() == at::kByte)) ++counters.reads;
      if (index.is_cpu()) { ++counters.uploads; ++counters.blocking_uploads; ++counters.pageable_uploads; }
    });
  }
}

// Lets a CPU kernel that asks for no generator draw from a device's.
class HostDraws {
 public:
  explicit HostDraws(bool needed, int64_t device) : host_(at::detail::getDefaultCPUGenerator()) {
    if (!needed) return;
    lock_ = std::unique_lock<std::mutex>(mutex());
    before_ = host_.get_state();
    auto draws = at::check_generator<Generator>(default_generator(device))->draw();
    host_.set_state(draws.get_state());
  }
  ~HostDraws() { if (before_.defined()) host_.set_state(before_); }

 private:
  static std::mutex& mutex() { static std::mutex one; return one; }
  at::Generator host_;
  Tensor before_;
  std::unique_lock<std::mutex> lock_;
};

inline IValue map_tensors(const IValue& value, const std::function<Tensor(const Tensor&)>& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    std::vector<Tensor> made;
    for (const Tensor& tensor : value.toTensorVector()) made.push_back(change(tensor));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> made;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorList())
      made.push_back(tensor ? std::optional<Tensor>(change(*tensor)) : std::nullopt);
    return made;
  }
  return value;
}

// What an operator writes to, by its schema; those of batch norms don't say that they write to running statistics.
inline void write(const c10::FunctionSchema& schema, c10::ArrayRef<IValue> arguments) {
  auto names_training = schema.argumentIndexWithName("training");
  bool is_training = !names_training || arguments[*names_training].toBool();
  for (size_t index = 0; index < arguments.size(); ++index) {
    auto& argument = schema.arguments()[index];
    bool is_statistic = argument.name() == "running_mean" || argument.name() == "running_var";
    if ((is_statistic && is_training) || (argument.alias_info() && argument.alias_info()->isWrite()))
      for_each_tensor(arguments[index], [](const Tensor& tensor) {
        if (tensor.defined() && tensor.is_cuda()) written(tensor.storage());
      });
  }
}

inline void run_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto name = name_of(op);
  const size_t count = schema.arguments().size();
  ++counters.kernels;
  use_driver();
  check_devices(op, name, torch::jit::last(*stack, count));
  count_reads(name, torch::jit::last(*stack, count));
  write(schema, torch::jit::last(*stack, count));

  Aliases aliases;
  const size_t first = stack->size() - count;
  std::optional<size_t> generator;
  for (size_t index = 0; index < count; ++index) {
    auto& value = (*stack)[first + index];
    if (value.isDevice() && value.toDevice().is_cuda()) {
      aliases.device = value.toDevice();
      value = c10::Device(c10::kCPU);
    } else if (schema.arguments()[index].name() == "generator") {
      generator = first + index;
    } else {
      value = map_tensors(value, [&](const Tensor& tensor) { return aliases.of(tensor); });
    }
  }
  bool draws = op.hasTag(at::Tag::nondeterministic_seeded) || generator;
  int64_t device = aliases.device && aliases.device->has_index() ? aliases.device->index() : current_device;
  if (generator) {
    auto& value = (*stack)[*generator];
    auto given = value.isNone() ? default_generator(device) : value.toGenerator();
    TORCH_CHECK(given.device().is_cuda(), "Expected a 'cuda' device type for generator but found 'cpu'");
    value = at::check_generator<Generator>(given)->draw();
  }
  {
    HostDraws on_host(draws && !generator, device);
    op.redispatchBoxed(CPU_KEYS, stack);
  }
  aliases.update();
  for (auto& value : torch::jit::last(*stack, schema.returns().size()))
    const_cast<IValue&>(value) = map_tensors(value, [&](const Tensor& tensor) { return aliases.back(tensor); });
}

// Sizes that CUDA's operator, too, leaves on the host.
inline std::tuple<Tensor, Tensor> pack_padded_sequence(const Tensor& input, const Tensor& lengths, bool batch_first) {
  auto [data, sizes] = at::_pack_padded_sequence(as_cpu(input), lengths, batch_first);
  return {data.to(input.device(), true), sizes};
}
}  // namespace pretended
