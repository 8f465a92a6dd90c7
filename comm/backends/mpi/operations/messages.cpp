#include "backends/mpi/operations/operation.h"

#include <cstring>

#include <ddp/internal/check.h>

#include "backends/message_check.h"
#include "backends/mpi/channel.h"
#include "backends/mpi/mpi_thread.h"

namespace ddp::backends::mpi {
namespace {

// A copy of this many bytes costs less than a second message.
constexpr size_t kMostInEnvelope = size_t{16} << 10;

struct Envelope {
  MessageHeader header;
  uint64_t number = 0;  // of the sender's messages to the receiver
};

int tag_of_elements(uint64_t number) { return static_cast<int>(number & 0x7fff); }

class Send : public Operation {
 public:
  Send(at::Tensor tensor, int to, int tag) : tensor_(std::move(tensor)), to_(to), tag_(tag) {}

  bool advance() override {
    has_moved_ = !envelope_sent_;
    if (!envelope_sent_) post();
    return envelope_sent_->are_over() && elements_sent_->are_over();
  }

 private:
  void post() {
    const auto bytes = tensor_.nbytes();
    const bool is_short = bytes <= kMostInEnvelope;
    const Envelope envelope{
        {tensor_.numel(), static_cast<int64_t>(tensor_.scalar_type())},
        channel->sent[static_cast<size_t>(to_)]++};
    packet_.resize(sizeof envelope + (is_short ? bytes : 0));
    std::memcpy(packet_.data(), &envelope, sizeof envelope);
    if (is_short && bytes > 0) {
      std::memcpy(packet_.data() + sizeof envelope, tensor_.const_data_ptr(), bytes);
    }
    envelope_sent_.emplace(channel->messages);
    envelope_sent_->send(packet_.data(), packet_.size(), to_, tag_, &MPI_Issend);
    elements_sent_.emplace(channel->elements);
    if (is_short) return;
    elements_sent_->send(tensor_.const_data_ptr(), bytes, to_, tag_of_elements(envelope.number));
  }

  const at::Tensor tensor_;
  const int to_;
  const int tag_;
  std::vector<char> packet_;
  std::optional<Transfers> envelope_sent_;
  std::optional<Transfers> elements_sent_;
};

class Receive : public Operation {
 public:
  Receive(at::Tensor tensor, std::optional<int> from, int tag)
      : tensor_(std::move(tensor)), from_(from.value_or(MPI_ANY_SOURCE)), tag_(tag) {}

  bool advance() override {
    has_moved_ = false;
    if (packet_.empty()) post();
    if (!elements_ && !open_envelope()) return false;
    if (!elements_->are_over()) return false;
    work->set_source(from_);
    return true;
  }

 private:
  void post() {
    packet_.resize(sizeof(Envelope) + kMostInEnvelope);
    check_mpi(
        MPI_Irecv(
            packet_.data(), static_cast<int>(packet_.size()), MPI_BYTE, from_, tag_,
            channel->messages, &request_),
        "MPI_Irecv");
  }

  /// \return  whether it has arrived.
  bool open_envelope() {
    int has_arrived = 0;
    MPI_Status status;
    check_mpi(MPI_Test(&request_, &has_arrived, &status), "MPI_Test");
    if (has_arrived == 0) return false;
    has_moved_ = true;
    from_ = status.MPI_SOURCE;
    Envelope envelope;
    std::memcpy(&envelope, packet_.data(), sizeof envelope);
    const auto problem =
        problem_of_message(envelope.header, tensor_, from_, tag_, channel->rank, channel->size);
    // The ranks no longer agree on what comes next: the error ends the group.
    DDP_CHECK(problem.empty(), problem);
    elements_.emplace(channel->elements);
    const auto bytes = tensor_.nbytes();
    if (bytes > kMostInEnvelope) {
      elements_->receive(
          tensor_.mutable_data_ptr(), bytes, from_, tag_of_elements(envelope.number));
    } else if (bytes > 0) {
      std::memcpy(tensor_.mutable_data_ptr(), packet_.data() + sizeof envelope, bytes);
    }
    return true;
  }

  const at::Tensor tensor_;
  int from_;
  const int tag_;
  std::vector<char> packet_;
  MPI_Request request_ = MPI_REQUEST_NULL;
  std::optional<Transfers> elements_;
};

}  // namespace

OperationPtr make_send(const at::Tensor& tensor, int to, int tag) {
  return std::make_unique<Send>(tensor, to, tag);
}

OperationPtr make_receive(const at::Tensor& tensor, std::optional<int> from, int tag) {
  return std::make_unique<Receive>(tensor, from, tag);
}

}  // namespace ddp::backends::mpi
