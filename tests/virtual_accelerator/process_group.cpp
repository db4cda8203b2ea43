// `virtual_ccl`: collectives by NCCL's rules. Gloo moves the data; nothing reads it before a stream was made to wait.
#include "virtual.h"

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <thread>

namespace virtual_accelerator {
using c10d::Backend, c10d::OpType, c10d::Work;
using WorkPtr = c10::intrusive_ptr<Work>;
using TensorLists = std::vector<Tensors>;

// The collectives of all groups with the same ranks: each rank has to call them in the same order.
struct Order {
  uint64_t next = 0;
  std::string last = "nothing";
};
static std::mutex issuing;

struct Collective final : Work {
  std::shared_ptr<Pending> pending;
  Clock end{};
  int device;
  bool waits_on_host;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  Collective(OpType type, int device) : Work(-1, type), device(device), waits_on_host(type == OpType::BARRIER) {}
  bool isCompleted() override { return pending->is_ready(); }
  bool isSuccess() const override { return true; }
  std::vector<Tensor> result() override { return future->value().toTensorVector(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
  void synchronize() override {
    stream_waits(current_stream(device), end);
    if (waits_on_host) host_waits(end, "barrier");
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
};

class VirtualCcl final : public Backend {
 public:
  VirtualCcl(c10::intrusive_ptr<Backend> gloo, c10::intrusive_ptr<c10d::Store> store, std::string name,
             std::string ranks)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), store_(std::move(store)),
        name_(std::move(name)), ranks_(std::move(ranks)) {
    static std::map<std::string, std::weak_ptr<Order>> orders;
    std::lock_guard<std::mutex> l(issuing);
    auto& known = orders[ranks_ + " " + std::to_string(getRank())];
    if (!(order_ = known.lock())) known = order_ = std::make_shared<Order>();
  }
  const std::string getBackendName() const override { return "virtual_ccl"; }
  void abort() override { is_aborted_ = true; }
  void shutdown() override { is_aborted_ = true; }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    const bool is_mean = options.reduceOp == c10d::ReduceOp::AVG;
    auto on_gloo = options;
    if (is_mean) on_gloo.reduceOp = c10d::ReduceOp::SUM;
    const auto start = [&](Tensors&, Tensors& out) { return gloo_->allreduce(out, on_gloo); };
    return run(OpType::ALLREDUCE, options.asyncOp, tensors, tensors, start, [=](Tensors&, Tensors& out) {
      if (is_mean) out[0].div_(getSize());
    });
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const auto start = [&](Tensors&, Tensors& out) { return gloo_->broadcast(out, options); };
    return run(OpType::BROADCAST, options.asyncOp, tensors, tensors, start);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const auto start = [&](Tensors&, Tensors& out) { return gloo_->reduce(out, options); };
    return run(OpType::REDUCE, options.asyncOp, tensors, tensors, start);
  }
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return run(OpType::ALLGATHER, options.asyncOp, inputs, outputs[0], [&](Tensors& in, Tensors& out) {
      TensorLists lists{out};
      return gloo_->allgather(lists, in, options);
    });
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    return run(OpType::_ALLGATHER_BASE, options.asyncOp, {input}, {output}, [&](Tensors& in, Tensors& out) {
      TensorLists lists{out[0].view({getSize(), -1}).unbind()};
      Tensors flat{in[0].view(-1)};
      return gloo_->allgather(lists, flat, options);
    });
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    c10d::AllreduceOptions on_gloo;
    on_gloo.reduceOp = options.reduceOp;
    const auto start = [&](Tensors& in, Tensors&) { return gloo_->allreduce(in, on_gloo); };
    return run(OpType::_REDUCE_SCATTER_BASE, options.asyncOp, {input}, {output}, start, [=](Tensors& in, Tensors& out) {
      out[0].copy_(in[0].view({getSize(), -1})[getRank()].view_as(out[0]));
    });
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    return run(OpType::SEND, true, tensors, {}, [&](Tensors& in, Tensors&) { return gloo_->send(in, to, tag); });
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return run(OpType::RECV, true, {}, tensors, [&](Tensors&, Tensors& out) { return gloo_->recv(out, from, tag); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    Tensors token{at::zeros({1}, c10::Device(c10::kPrivateUse1, device_ < 0 ? current_device() : device_))};
    const auto start = [&](Tensors&, Tensors& out) { return gloo_->allreduce(out, c10d::AllreduceOptions()); };
    return run(OpType::BARRIER, options.asyncOp, token, token, start);
  }

 private:
  using Start = std::function<WorkPtr(Tensors& in, Tensors& out)>;
  using Finish = std::function<void(Tensors& in, Tensors& out)>;
  WorkPtr run(OpType type, bool is_async, const Tensors& inputs, const Tensors& outputs, const Start& start,
              Finish finish = nullptr) {
    const bool is_p2p = c10d::isP2POp(type);
    for (auto* tensors : {&inputs, &outputs}) check_tensors(*tensors);
    const int current = current_stream(device_);
    const int stream = is_async ? device_ * kStreams + stream_ : current;
    if (is_async) stream_waits(stream, clock_of(current));
    auto in = copies(inputs), out = copies(outputs);
    const auto& shown = (inputs.empty() ? outputs : inputs)[0];
    const auto name = c10::str("`", c10d::opTypeToString(type), " of ", shown.numel(), " ", shown.scalar_type(),
                               " in group ", name_, "`");
    auto collective = c10::make_intrusive<Collective>(type, static_cast<int>(device_));
    auto pending = collective->pending = std::make_shared<Pending>();
    pending->number = launched(name, inputs, outputs, stream);
    pending->stream = stream;
    std::string entry;
    WorkPtr work;
    uint64_t number;
    {
      std::lock_guard<std::mutex> l(issuing);
      at::AutoDispatchBelowADInplaceOrView below;
      number = is_p2p ? 0 : number_++;
      if (!is_p2p) {
        entry = c10::str(name, " as number ", order_->next++, ", behind ", std::exchange(order_->last, name));
        store_->set(key(number, getRank()), std::vector<uint8_t>(entry.begin(), entry.end()));
      }
      work = start(in, out);
    }
    if (!is_p2p) pending->is_ready = [=] { return work->isCompleted(); };  // gloo completes p2p in `wait` only
    pending->finish = [=, self = c10::intrusive_ptr<VirtualCcl>::reclaim_copy(this)]() mutable {
      at::AutoDispatchBelowADInplaceOrView below;
      if (!is_p2p) self->compare(number, entry);
      // The data of an aborted collective are rubbish, as on a GPU.
      if (!is_p2p && !self->wait_until([&] { return work->isCompleted(); })) return;
      try {
        work->wait();
      } catch (const std::exception&) {  // a rank is gone, which NCCL does not notice: only an abort ends the wait
        self->wait_until([] { return false; });
        return;
      }
      if (finish) finish(in, out);
      for (size_t i = 0; i < outputs.size(); i++) host_view(outputs[i], false).copy_(out[i]);
    };
    for (auto* tensors : {&inputs, &outputs}) for (auto& t : *tensors) record(t, stream);
    defer(pending, outputs);
    collective->end = clock_of(stream);
    const std::vector<c10::Device> devices{c10::Device(c10::kPrivateUse1, device_)};
    const auto result = c10::ListType::create(c10::TensorType::get());
    collective->future = c10::make_intrusive<c10::ivalue::Future>(result, devices);
    const int before = exchange_stream(device_, stream % kStreams);  // of the events in the future
    collective->future->markCompleted(c10::IValue(outputs));
    exchange_stream(device_, before);
    return collective;
  }
  void check_tensors(const Tensors& tensors) {
    for (auto& t : tensors) {
      const bool fits = t.is_privateuseone() && t.is_non_overlapping_and_dense() && t.scalar_type() != at::kShort;
      TORCH_CHECK(fits, "virtual_ccl: tensors must be virtual, dense and of a type that NCCL has, got ", t.toString());
      if (t.device().index() == device_) continue;
      const bool may_move = device_ < 0 || (!getBoundDeviceId() && &t == &tensors[0]);  // NCCL: a communicator a device
      TORCH_CHECK(may_move, "virtual_ccl: group ", name_, " is not on ", t.device());
      const auto [known, is_new] = streams_.try_emplace(device_ = t.device().index());
      if (is_new) known->second = new_stream(device_);
      stream_ = known->second;
    }
  }
  static Tensors copies(const Tensors& tensors) {
    at::AutoDispatchBelowADInplaceOrView below;
    Tensors copied;
    for (auto& t : tensors) copied.push_back(host_view(t).clone());
    return copied;
  }
  std::string key(uint64_t number, int rank) const { return c10::str("order/", number, "/", rank); }
  bool wait_until(const std::function<bool()>& is_done) {
    while (!is_done()) {
      if (is_aborted_) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    return true;
  }
  void compare(uint64_t number, const std::string& entry) {
    std::vector<std::string> keys;
    for (int rank = 0; rank < getSize(); rank++) keys.push_back(key(number, rank));
    const auto place = [](const std::string& text) { return text.substr(0, text.find(", behind")); };
    try {
      if (!wait_until([&] { return store_->check(keys); })) return;
      for (int rank = 0; rank < getSize(); rank++) {
        const auto bytes = store_->get(keys[rank]);
        const std::string other(bytes.begin(), bytes.end());
        TORCH_CHECK(place(other) == place(entry), "virtual_ccl: ranks ", ranks_, " call collectives in different ",
                    "orders: rank ", getRank(), " calls ", entry, "; rank ", rank, " calls ", other);
      }
    } catch (const c10::DistNetworkError&) {  // the process with the store has ended
    }
  }

  c10::intrusive_ptr<Backend> gloo_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::string name_, ranks_;
  std::shared_ptr<Order> order_;
  std::atomic<bool> is_aborted_{false};
  int device_ = -1, stream_ = 0;  // of the last collective
  std::map<int, int> streams_;  // of each device
  uint64_t number_ = 0;
};
}  // namespace virtual_accelerator

void bind_process_group(pybind11::module& m) {
  namespace py = pybind11;
  using namespace virtual_accelerator;
  using Gloo = c10::intrusive_ptr<c10d::Backend>;
  using Store = c10::intrusive_ptr<c10d::Store>;
  py::class_<VirtualCcl, c10::intrusive_ptr<VirtualCcl>, c10d::Backend>(m, "VirtualCcl")
      .def(py::init([](const Gloo& gloo, const Store& store, const std::string& name, const std::string& ranks) {
        return c10::make_intrusive<VirtualCcl>(gloo, store, name, ranks);
      }));
}
