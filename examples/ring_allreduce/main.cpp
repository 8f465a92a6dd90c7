// An all-reduce in which each rank sends every byte twice at most, whatever the number of ranks:
// `ddprun -n 4 ring_allreduce`.
#include <ddp/ddp.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>

#include <chrono>

#include "../common/command_line.h"
#include "../common/program.h"

namespace {

struct Options {
  std::string backend;
  int64_t elements = 1 << 20;
  int rounds = 5;
};

std::optional<Options> parse_options(int argc, const char* const* argv, std::ostream& help) {
  Options options;
  CLI::App app(
      "Sums up a tensor over all ranks, in a ring by hand and by the library.", "ring_allreduce");
  app.option_defaults()->always_capture_default();
  app.add_option("--elements", options.elements, "Of the tensor")
      ->check(examples::between<int64_t>(1, 1 << 28));
  app.add_option("--rounds", options.rounds, "How often")->check(examples::between(1, 1000000));
  app.add_option("--backend", options.backend, "gloo or shm; empty: the best there is");
  if (!examples::parse_command_line(app, argc, argv, help)) return std::nullopt;
  return options;
}

// Sends to the next rank while it receives from the previous one.
void send_and_receive(const at::Tensor& piece, at::Tensor& received) {
  const int rank = ddp::get_rank();
  const int ranks = ddp::get_world_size();
  const auto sent = ddp::send_async(piece, (rank + 1) % ranks);
  ddp::recv(received, (rank + ranks - 1) % ranks);
  sent->wait();
}

// Every rank begins with a tensor, and ends with the sum of all.
void ring_all_reduce(at::Tensor& tensor) {
  const int rank = ddp::get_rank();
  const int ranks = ddp::get_world_size();
  if (ranks == 1) return;
  auto pieces = tensor.flatten().tensor_split(ranks);  // views
  const auto piece = [&](int number) -> at::Tensor& {
    return pieces[static_cast<size_t>((number % ranks + ranks) % ranks)];
  };
  // A piece travels once around the ring, and each rank adds its part: after this, rank r has the
  // sum of piece r + 1. All ranks are busy all the time, each with another piece.
  for (int turn = 0; turn < ranks - 1; ++turn) {
    auto received = torch::empty_like(piece(rank - turn - 1));
    send_and_receive(piece(rank - turn), received);
    piece(rank - turn - 1).add_(received);
  }
  // The sums travel once more around the ring, so that every rank gets all of them.
  for (int turn = 0; turn < ranks - 1; ++turn) {
    send_and_receive(piece(rank - turn + 1), piece(rank - turn));
  }
}

void run(const Options& options, examples::Progress& progress) {
  const auto time = [&](const char* name, const auto& all_reduce) {
    double best = std::numeric_limits<double>::infinity();
    double difference = 0;
    for (int round = 0; round < options.rounds; ++round) {
      auto tensor = torch::full({options.elements}, ddp::get_rank() + round + 1.0F);
      auto expected = tensor.clone();
      ddp::barrier();
      const auto start = std::chrono::steady_clock::now();
      all_reduce(tensor);
      const std::chrono::duration<double, std::milli> took =
          std::chrono::steady_clock::now() - start;
      best = std::min(best, took.count());
      ddp::all_reduce(expected);
      difference = std::max(difference, (tensor - expected).abs().max().item<double>());
    }
    TORCH_CHECK(difference == 0, name, ": sums differ by ", difference);
    progress.line(c10::str(name, ": ", best, " ms for ", options.elements, " elements"));
  };
  time("ring by hand", ring_all_reduce);
  time("ddp::all_reduce", [](at::Tensor& tensor) { ddp::all_reduce(tensor); });
  const auto ranks = static_cast<double>(ddp::get_world_size());
  progress.line(c10::str(
      "each rank sent ", 2 * (ranks - 1) / ranks,
      " times the tensor's bytes; to send it to all "
      "others would have been ",
      ranks - 1, " times"));
}

}  // namespace

int main(int argc, char** argv) {
  return examples::run_program("ring_allreduce", argc, argv, parse_options, run);
}
