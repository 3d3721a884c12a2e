// The extension: what is registered for the dispatch key CUDA, and what Python asks of it.
#include <torch/csrc/utils/pybind.h>

#include "attention.h"
#include "collectives.h"
#include "kernels.h"
#include "recurrent.h"

namespace py = pybind11;
using namespace pretended;

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &pretended::empty_strided);
  m.impl("copy_", &pretended::copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("resize_", &pretended::resize_);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("set_.source_Storage_storage_offset", &set_storage_);
  m.impl("set_.source_Storage", &set_source_);
  m.impl("set_.source_Tensor", &set_tensor_);
  m.impl("set_", &set_empty_);
  m.impl("record_stream", [](Tensor& self, at::Stream) { use_driver(); });
  m.impl("_pack_padded_sequence", &pack_padded_sequence);
  m.impl("_fused_sdp_choice", &choose_attention);
  m.impl("_scaled_dot_product_efficient_attention", &efficient_attention);
  m.impl("_scaled_dot_product_efficient_attention_backward", &efficient_attention_backward);
  m.impl("_thnn_fused_lstm_cell", &pretended::lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", &pretended::gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
  // Made of others for any device: CUDA's own choice among kernels would end at some that the CPU doesn't have.
  for (const char* name : {"convolution", "convolution_overrideable", "convolution_backward", "mse_loss", "smooth_l1_loss"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

namespace at::native {
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &choose_attention)
}

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::DeviceType::CUDA, pretended::HostTimer)
}

static py::dict figures(const c10::CachingAllocator::Stat& stat) {
  py::dict made;
  made["current"] = stat.current;
  made["peak"] = stat.peak;
  made["allocated"] = stat.allocated;
  made["freed"] = stat.freed;
  return made;
}
static py::dict figures(const c10::CachingAllocator::StatArray& stats) {
  py::dict made;
  const char* names[] = {"all", "small_pool", "large_pool"};
  for (int kind = 0; kind < 3; ++kind) made[names[kind]] = figures(stats[kind]);
  return made;
}
static py::dict memory_stats(int device) {
  auto stats = allocator.getDeviceStats(static_cast<c10::DeviceIndex>(device));
  py::dict made;
  made["num_alloc_retries"] = stats.num_alloc_retries;
  made["num_ooms"] = stats.num_ooms;
  made["num_sync_all_streams"] = stats.num_sync_all_streams;
  made["num_device_alloc"] = stats.num_device_alloc;
  made["num_device_free"] = stats.num_device_free;
  made["allocation"] = figures(stats.allocation);
  made["segment"] = figures(stats.segment);
  made["active"] = figures(stats.active);
  made["inactive_split"] = figures(stats.inactive_split);
  made["allocated_bytes"] = figures(stats.allocated_bytes);
  made["reserved_bytes"] = figures(stats.reserved_bytes);
  made["active_bytes"] = figures(stats.active_bytes);
  made["inactive_split_bytes"] = figures(stats.inactive_split_bytes);
  made["requested_bytes"] = figures(stats.requested_bytes);
  return made;
}

static std::string python_stack() {
  if (!PyGILState_Check()) return "a thread without Python";
  return py::str("").attr("join")(py::module_::import("traceback").attr("format_stack")()).cast<std::string>();
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  where = &python_stack;
  m.def("count_devices", [] { use_driver(); return num_devices(); });
  m.def("use_driver", &use_driver);
  m.def("is_in_bad_fork", [] { return in_bad_fork.load(); });
  m.def("first_use", [] { return driver_used ? py::cast(first_use) : py::none().cast<py::object>(); });
  m.def("current_device", [] { return current_device; });
  m.def("set_device", [](int64_t index) { set_device(index); });
  m.def("exchange_device", [](int64_t index) { int before = current_device; set_device(index); return before; });
  m.def("current_stream", [](int64_t device) { return current_stream[device < 0 ? current_device : device]; });
  m.def("set_stream", [](int64_t stream, int64_t device) { set_device(device); current_stream[device] = stream; });
  m.def("new_stream", [](int priority) { use_driver(); return new_stream(current_device, priority); });
  m.def("synchronize", [] { Guard().synchronizeDevice(0); });
  m.def("elapsed_ms", [](uintptr_t first, uintptr_t second) {
    return Guard().elapsedTime(reinterpret_cast<void*>(first), reinterpret_cast<void*>(second), 0);
  });
  m.def("default_generator", [](int64_t device) { return default_generator(device); });
  m.def("memory_stats", &memory_stats);
  m.def("memory_info", [](int device) { return allocator.getMemoryInfo(static_cast<c10::DeviceIndex>(device)); });
  m.def("reset_peak", [](int device) { allocator.resetPeakStats(static_cast<c10::DeviceIndex>(device)); });
  m.def("reset_accumulated", [](int device) { allocator.resetAccumulatedStats(static_cast<c10::DeviceIndex>(device)); });
  m.def("empty_cache", [] { allocator.emptyCache({0, 0}); });
  m.def("capacity_bytes", &capacity_bytes);
  m.def("resize_storage", [](const at::Tensor& of, int64_t bytes) { resize_storage(of.storage(), bytes); });
  m.def("on_gloo", [](const c10::intrusive_ptr<c10d::Backend>& gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<OnGloo>(gloo);
  });
  m.def("counts", [] {
    return std::map<std::string, int64_t>{{"reads", counters.reads}, {"uploads", counters.uploads},
                                          {"blocking_uploads", counters.blocking_uploads},
                                          {"pageable_uploads", counters.pageable_uploads}, {"waits", counters.waits},
                                          {"kernels", counters.kernels}};
  });
}
