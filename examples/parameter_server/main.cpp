// Workers train without waiting for each other, around a process that keeps the parameters:
//
//     parameter_server --workers 3                         # starts them, on this host
//     ddprun -n 4 parameter_server                         # rank 0 serves, the others work
//     parameter_server --serve --workers 3 --address host:29600        # or each by hand,
//     parameter_server --worker 0 --workers 3 --address host:29600     # on any host
//
// A worker takes the parameters, computes a gradient, sends it, and takes the parameters again. The
// server applies gradients in the order in which they come. The parameters that a worker computes
// with are stale by the steps of other workers in between. The bound: no worker is more than
// --ahead steps ahead of the slowest live worker, so that at most (workers - 1) * (2 * ahead + 1)
// steps lie between.
//
// A worker that is killed is left out; the others continue with its share of the steps undone
// (under ddprun, which ends a job that loses a rank, they do not). The server sends and receives
// all bytes, which is why a DistributedDataParallel scales further.
#include <unistd.h>

#include <ddp/ddp.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <condition_variable>
#include <csignal>
#include <functional>
#include <iostream>
#include <map>
#include <mutex>
#include <thread>

#include "../common/command_line.h"
#include "../common/data/digits.h"
#include "../common/default_group.h"

namespace {

using examples::UsageError;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

struct Options : examples::DigitsOptions {
  int workers = 2;
  int worker = -1;  // number of this worker; -1: none
  bool serve = false;
  std::string address;  // "": start the processes here
  int64_t steps = 200;
  int64_t ahead = 4;
};

std::optional<Options> parse_options(int argc, const char* const* argv) {
  Options options;
  CLI::App app(
      "Trains on handwritten digits with workers that do not wait for each other.",
      "parameter_server");
  examples::add_digits_options(app, options);
  app.remove_option(app.get_option("--epochs"));
  app.remove_option(app.get_option("--backend"));
  auto* workers =
      app.add_option("--workers", options.workers, "How many")->check(examples::between(1, 100));
  app.add_option("--steps", options.steps, "Gradients of each worker")
      ->check(examples::between<int64_t>(1, 1000000));
  app.add_option("--ahead", options.ahead, "Steps that a worker may be ahead of the slowest")
      ->check(examples::between<int64_t>(0, 1000000));
  auto* address = app.add_option("--address", options.address, "HOST:PORT of the server");
  auto* serve =
      app.add_flag("--serve", options.serve, "Be the server, and start no workers")->needs(address);
  auto* worker = app.add_option("--worker", options.worker, "Be this worker, from 0")
                     ->check(examples::between(0, 99))
                     ->excludes(serve)
                     ->needs(address);
  if (!examples::parse_command_line(app, argc, argv, std::cout)) return std::nullopt;
  for (const auto* option : {workers, address, serve, worker}) {
    if (ddp::is_launched() && !option->empty()) {
      throw UsageError(
          option->get_name() +
          ": expected none under a launcher, whose rank 0 is the server and others the workers");
    }
  }
  if (options.worker >= options.workers) {
    throw UsageError(c10::str("--worker: expected below --workers, got ", options.worker));
  }
  return options;
}

c10::intrusive_ptr<c10d::TCPStore> make_store(
    const std::string& host, uint16_t port, bool is_server) {
  c10d::TCPStoreOptions store;
  store.port = port;
  store.isServer = is_server;
  store.waitWorkers = false;
  store.timeout = std::chrono::seconds(60);
  return c10::make_intrusive<c10d::TCPStore>(host, store);
}

c10::intrusive_ptr<c10d::TCPStore> store_at(const std::string& address, bool is_server) {
  const auto colon = address.rfind(':');
  const auto port = colon == std::string::npos ? 0 : std::atoi(address.c_str() + colon + 1);
  if (port < 1 || port > 65535) {
    throw UsageError("--address: expected HOST:PORT, got " + address);
  }
  return make_store(address.substr(0, colon), static_cast<uint16_t>(port), is_server);
}

/// Connects the server and a worker, and returns their group.
using Connect = std::function<ddp::ProcessGroup(int worker)>;

// Each worker has a group of its own with the server, so that a lost worker breaks no other group.
ddp::ProcessGroup connect_over(StorePtr store, int worker, bool is_server) {
  return ddp::make_process_group(ddp::ProcessGroupOptions()
                                     .backend("gloo")
                                     .store(c10::make_intrusive<c10d::PrefixStore>(
                                         c10::str("worker-", worker), std::move(store)))
                                     .rank(is_server ? 0 : 1)
                                     .world_size(2)
                                     .timeout(std::chrono::seconds(60)));
}

at::Tensor flat(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> pieces;
  for (const auto& t : tensors) pieces.push_back(t.flatten());
  return torch::cat(pieces).detach();
}

void unflatten(const at::Tensor& values, const std::vector<at::Tensor>& tensors) {
  const torch::NoGradGuard no_grad;
  int64_t at = 0;
  for (const auto& t : tensors) {
    t.copy_(values.narrow(0, at, t.numel()).view_as(t));
    at += t.numel();
  }
}

/// Keeps the parameters and the progress of each worker.
class Server {
 public:
  Server(const Options& options, at::Tensor parameters)
      : options_(options),
        parameters_(std::move(parameters)),
        optimizer_({parameters_}, torch::optim::SGDOptions(options.lr)) {
    for (int worker = 0; worker < options.workers; ++worker) steps_of_[worker] = 0;
  }

  /// Serves one worker, on a thread of its own, until it has ended or is lost.
  void serve(int worker, const Connect& connect) {
    try {
      const auto group = connect(worker);
      print_line(c10::str("worker ", worker, " has come"));
      auto gradient = torch::empty_like(parameters_);
      auto [copy, version] = wait_for_turn(worker);
      ddp::send(copy, 1, 0, group);
      for (int64_t step = 0; step < options_.steps; ++step) {
        ddp::recv(gradient, 1, 0, group);
        apply(worker, gradient, version);
        if (step + 1 == options_.steps) break;
        std::tie(copy, version) = wait_for_turn(worker);
        ddp::send(copy, 1, 0, group);
      }
      print_line(c10::str("worker ", worker, " has done its steps"));
    } catch (const c10::Error& error) {
      print_line(c10::str("worker ", worker, " is lost: ", error.what_without_backtrace()));
    }
    const std::lock_guard lock(mutex_);
    steps_of_.erase(worker);  // the others need not wait for it any more
    changed_.notify_all();
  }

  const at::Tensor& parameters() const { return parameters_; }
  int64_t version() const { return version_; }
  int64_t largest_staleness() const { return largest_staleness_; }

  static void print_line(const std::string& text) { std::cout << text + '\n' << std::flush; }

 private:
  // Waits until the worker is not too far ahead. Returns the parameters and their version.
  std::pair<at::Tensor, int64_t> wait_for_turn(int worker) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] {
      for (const auto& [other, steps] : steps_of_) {
        if (steps_of_[worker] > steps + options_.ahead) return false;
      }
      return true;
    });
    return {parameters_.clone(), version_};
  }

  void apply(int worker, const at::Tensor& gradient, int64_t computed_with) {
    const std::lock_guard lock(mutex_);
    largest_staleness_ = std::max(largest_staleness_, version_ - computed_with);
    parameters_.mutable_grad() = gradient;
    optimizer_.step();
    ++version_;
    ++steps_of_[worker];
    changed_.notify_all();
  }

  const Options& options_;
  std::mutex mutex_;
  std::condition_variable changed_;
  at::Tensor parameters_;
  torch::optim::SGD optimizer_;
  std::map<int, int64_t> steps_of_;  // by live worker
  int64_t version_ = 0;              // gradients applied
  int64_t largest_staleness_ = 0;
};

/// \param open  called once the data is read: lets the workers connect.
void run_server(const Options& options, const std::function<Connect()>& open) {
  const auto train = read_digits(options, "train");
  const auto test = read_digits(options, "t10k");
  auto net = make_classifier(train, options);
  Server server(options, flat(net->parameters()));
  const auto connect = open();
  std::vector<std::thread> threads;
  for (int worker = 0; worker < options.workers; ++worker) {
    threads.emplace_back([&, worker] { server.serve(worker, connect); });
  }
  for (auto& thread : threads) thread.join();
  unflatten(server.parameters(), net->parameters());
  Server::print_line(c10::str(
      server.version(), " gradients applied, at most ", server.largest_staleness(),
      " steps stale; test accuracy ", percent_right(net, test), "%"));
}

void run_worker(const Options& options, const Connect& connect) {
  const auto train = read_digits(options, "train");
  read_digits(
      options, "t10k");  // reading is collective under a launcher, so read what the server reads
  auto net = make_classifier(train, options);
  const auto parameters = net->parameters();
  const auto group = connect(options.worker);
  ddp::DistributedSampler sampler(
      static_cast<size_t>(train.size()),
      ddp::DistributedSamplerOptions().num_replicas(options.workers).rank(options.worker));
  auto values = flat(parameters);
  for (int64_t step = 0; step < options.steps; ++step) {
    ddp::recv(values, 0, 0, group);
    unflatten(values, parameters);
    auto indices = sampler.next(options.batch_size);
    if (!indices) {
      sampler.set_epoch(sampler.epoch() + 1);
      sampler.reset();
      indices = sampler.next(options.batch_size);
    }
    const auto batch = train.at(*indices);
    net->zero_grad();
    torch::cross_entropy_loss(net->forward(batch.pixels), batch.labels).backward();
    std::vector<at::Tensor> gradients;
    for (const auto& p : parameters) gradients.push_back(p.grad());
    ddp::send(flat(gradients), 0, 0, group);
  }
}

// Starts the workers of this host, as processes of the same program.
void start_workers(const Options& options, const std::string& address, int argc, char** argv) {
  std::signal(SIGCHLD, SIG_IGN);  // the server notices a worker's end on its connection
  for (int worker = 0; worker < options.workers; ++worker) {
    const auto number = std::to_string(worker);
    std::vector<char*> arguments(argv, argv + argc);
    for (const char* more : {"--worker", number.c_str(), "--address", address.c_str()}) {
      arguments.push_back(const_cast<char*>(more));
    }
    arguments.push_back(nullptr);
    const auto pid = fork();
    TORCH_CHECK(pid >= 0, "cannot start worker ", worker, ": ", std::strerror(errno));
    if (pid == 0) {
      execv("/proc/self/exe", arguments.data());
      _exit(127);
    }
    Server::print_line(c10::str("worker ", worker, " is process ", pid));
  }
}

// Runs a launched rank: rank 0 is the server.
void run_rank(Options options) {
  const examples::DefaultGroup group("gloo");
  options.workers = ddp::get_world_size() - 1;
  options.worker = ddp::get_rank() - 1;
  if (options.workers == 0) {
    throw UsageError("expected 2 ranks or more under a launcher, a server and its workers, got 1");
  }
  std::vector<ddp::ProcessGroup> groups;
  for (int worker = 0; worker < options.workers; ++worker) {
    groups.push_back(ddp::new_group({0, worker + 1}));
  }
  const Connect connect = [&](int worker) { return groups.at(static_cast<size_t>(worker)); };
  if (options.worker >= 0) return run_worker(options, connect);
  run_server(options, [&] { return connect; });
}

void run_alone(const Options& options, int argc, char** argv) {
  const auto connect_over_store = [](const c10::intrusive_ptr<c10d::TCPStore>& store) -> Connect {
    // Each worker has its own connection to the store: waiting for one blocks no other.
    return [=](int worker) { return connect_over(store->clone(), worker, /*is_server=*/true); };
  };
  if (options.worker >= 0) {
    return run_worker(options, [&](int worker) {
      const auto store = store_at(options.address, /*is_server=*/false);
      return connect_over(store, worker, /*is_server=*/false);
    });
  }
  run_server(options, [&] {
    if (options.serve) return connect_over_store(store_at(options.address, /*is_server=*/true));
    const std::string host = "127.0.0.1";
    const auto store = make_store(host, /*port=*/0, /*is_server=*/true);  // any free port
    start_workers(options, c10::str(host, ':', store->getPort()), argc, argv);
    return connect_over_store(store);
  });
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const auto options = parse_options(argc, argv);
    if (!options) return 0;
    at::set_num_threads(1);
    ddp::is_launched() ? run_rank(*options) : run_alone(*options, argc, argv);
    return 0;
  } catch (const UsageError& error) {
    std::cerr << "parameter_server: " << error.what() << std::endl;
    return 2;
  } catch (const c10::Error& error) {
    std::cerr << "parameter_server: " << error.what_without_backtrace() << std::endl;
  } catch (const std::exception& error) {
    std::cerr << "parameter_server: " << error.what() << std::endl;
  }
  return 1;
}
