// NCCL's place taken by gloo on the same memory.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include "kernels.h"

namespace pretended {
using Tensors = std::vector<Tensor>;
template <typename T> using Ptr = c10::intrusive_ptr<T>;

// What was begun; `finish` is done once, when it has arrived.
class Begun final : public c10d::Work {
 public:
  Begun(std::vector<Ptr<c10d::Work>> parts, Tensors outputs, Tensors aliases)
      : parts_(std::move(parts)), outputs_(std::move(outputs)), aliases_(std::move(aliases)) {}
  bool isCompleted() override {
    return std::all_of(parts_.begin(), parts_.end(), [](auto& part) { return part->isCompleted(); });
  }
  bool isSuccess() const override {
    return std::all_of(parts_.begin(), parts_.end(), [](auto& part) { return part->isSuccess(); });
  }
  bool wait(std::chrono::milliseconds timeout) override {
    for (auto& part : parts_) part->wait(timeout);
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  Tensors result() override { return outputs_; }
  Ptr<c10::ivalue::Future> getFuture() override {
    wait(kNoTimeout);
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(IValue(outputs_));
    return future;
  }

 private:
  std::vector<Ptr<c10d::Work>> parts_;
  Tensors outputs_, aliases_;
};

// DistributedDataParallel times its first steps on the device.
class HostTimer final : public c10d::Timer {
 public:
  explicit HostTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    auto started = getTimestamp(start), ended = getTimestamp(end);
    return started && ended && *ended >= *started ? std::make_optional(*ended - *started) : std::nullopt;
  }
};

class OnGloo final : public c10d::Backend {
 public:
  explicit OnGloo(Ptr<c10d::Backend> gloo) : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "nccl"; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { pending_.emplace(); }
  Ptr<c10d::Work> endCoalescing() override {
    auto parts = std::move(*pending_);
    pending_.reset();
    return c10::make_intrusive<Begun>(std::move(parts), Tensors{}, Tensors{});
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

  Ptr<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto on_host = aliases(tensors);
    return begun(gloo_->broadcast(on_host, options), tensors, on_host);
  }
  Ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return reduced(tensors, options, [&](Tensors& on_host, auto& given) { return gloo_->allreduce(on_host, given); });
  }
  Ptr<c10d::Work> allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return reduced(tensors, options, [&](Tensors& on_host, auto& given) { return gloo_->allreduce_coalesced(on_host, given); });
  }
  Ptr<c10d::Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return reduced(tensors, options, [&](Tensors& on_host, auto& given) { return gloo_->reduce(on_host, given); });
  }
  Ptr<c10d::Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto to = aliases(outputs);
    auto from = aliases(inputs);
    return begun(gloo_->allgather(to, from, options), outputs[0], from);
  }
  Ptr<c10d::Work> _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    auto to = alias(output), from = alias(input);
    return begun(gloo_->_allgather_base(to, from, options), {output}, {to, from});
  }
  Ptr<c10d::Work> allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    std::vector<Ptr<c10d::Work>> parts;
    for (size_t i = 0; i < outputs.size(); ++i) parts.push_back(_allgather_base(outputs[i], inputs[i], options));
    return c10::make_intrusive<Begun>(std::move(parts), outputs, inputs);
  }
  Ptr<c10d::Work> gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto to = aliases(outputs);
    auto from = aliases(inputs);
    return begun(gloo_->gather(to, from, options), outputs.empty() ? Tensors{} : outputs[0], from);
  }
  Ptr<c10d::Work> scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    auto to = aliases(outputs);
    auto from = aliases(inputs);
    return begun(gloo_->scatter(to, from, options), outputs, to);
  }
  Ptr<c10d::Work> reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    auto from = aliases(inputs);
    return reduced(outputs, options, [&](Tensors& to, auto& given) { return gloo_->reduce_scatter(to, from, given); });
  }
  Ptr<c10d::Work> _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto from = alias(input);
    Tensors outputs{output};
    return reduced(outputs, options, [&](Tensors& to, auto& given) { return gloo_->_reduce_scatter_base(to[0], from, given); });
  }
  Ptr<c10d::Work> reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    std::vector<Ptr<c10d::Work>> parts;
    for (size_t i = 0; i < outputs.size(); ++i) parts.push_back(_reduce_scatter_base(outputs[i], inputs[i], options));
    return c10::make_intrusive<Begun>(std::move(parts), outputs, inputs);
  }
  Ptr<c10d::Work> alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& to_sizes, std::vector<int64_t>& from_sizes,
                                const c10d::AllToAllOptions& options) override {
    auto to = alias(output), from = alias(input);
    return begun(gloo_->alltoall_base(to, from, to_sizes, from_sizes, options), {output}, {to, from});
  }
  Ptr<c10d::Work> send(Tensors& tensors, int to, int tag) override {
    auto on_host = aliases(tensors);
    return begun(gloo_->send(on_host, to, tag), tensors, on_host);
  }
  Ptr<c10d::Work> recv(Tensors& tensors, int from, int tag) override {
    auto on_host = aliases(tensors);
    return begun(gloo_->recv(on_host, from, tag), tensors, on_host);
  }
  Ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override {
    ++counters.waits;
    return begun(gloo_->barrier(c10d::BarrierOptions()), {}, {});
  }

 private:
  static Tensor alias(const Tensor& given) {
    TORCH_CHECK(given.is_cuda() && given.layout() == at::kStrided, "Tensors must be CUDA and dense");
    TORCH_CHECK(given.is_non_overlapping_and_dense(), "Tensors must be contiguous");
    auto type = given.scalar_type();
    TORCH_CHECK(type != at::kShort && !at::isComplexType(type), "Unconvertible NCCL type ", type);
    return as_cpu_to_write(given);  // as NCCL asks for the memory of what it sends, too
  }
  static Tensors aliases(const Tensors& given) {
    Tensors made;
    for (auto& tensor : given) made.push_back(alias(tensor));
    return made;
  }
  static std::vector<Tensors> aliases(const std::vector<Tensors>& given) {
    std::vector<Tensors> made;
    for (auto& tensors : given) made.push_back(aliases(tensors));
    return made;
  }
  Ptr<c10d::Work> begun(Ptr<c10d::Work> work, Tensors outputs, Tensors on_host) {
    if (pending_) pending_->push_back(work);
    return c10::make_intrusive<Begun>(std::vector<Ptr<c10d::Work>>{work}, std::move(outputs), std::move(on_host));
  }
  // Gloo has no mean: the sum is awaited here and divided.
  template <typename Options, typename Ask>
  Ptr<c10d::Work> reduced(Tensors& outputs, const Options& options, Ask ask) {
    auto on_host = aliases(outputs);
    if (options.reduceOp != c10d::ReduceOp::AVG) return begun(ask(on_host, options), outputs, on_host);
    auto of_sum = options;
    of_sum.reduceOp = c10d::ReduceOp::SUM;
    auto work = ask(on_host, of_sum);
    work->wait();
    for (auto& tensor : on_host) tensor.div_(getSize());
    return begun(work, outputs, on_host);
  }

  Ptr<c10d::Backend> gloo_;
  std::optional<std::vector<Ptr<c10d::Work>>> pending_;
};
}  // namespace pretended
