// A collective of the program's own between two steps: each kind, with sizes near edges, aliased
// arguments, and one in a forked child.
#include <sys/wait.h>
#include <unistd.h>

#include <numeric>

#include "differential/run.h"

namespace ddp::differential {
namespace {

/// Sizes near those at which a backend does something else, one of which a program has.
int64_t size_of(const Program& program, int ranks) {
  const std::vector<int64_t> sizes{0,    1,    ranks - 1, ranks, ranks + 1, 2047,
                                   2048, 2049, 8192,      8193,  65536};
  const auto size = sizes[mix(program.seed) % sizes.size()];
  // Over Gloo an all-reduce of no elements waits for no rank, so none finds a difference there.
  return program.is("collective", "unequal") ? std::max<int64_t>(1, size) : size;
}

class Collectives {
 public:
  explicit Collectives(RankRun& run)
      : run_(run),
        n_(size_of(run.program, run.self.size)),
        ranks_(run.self.size),
        group_(run.self.group) {
    trace().say(
        "{ const int64_t n = " + std::to_string(n_) +
        ", ranks = self.size; auto& group = self.group;");
  }
  ~Collectives() { trace().say("}"); }

  void run(const std::string& kind) {
    const auto& self = run_.self;
    const auto n = n_, ranks = ranks_;
    auto& group = group_;
    if (kind == "all_reduce") {
      say("auto t = values(self.rank, {n}); all_reduce(t, c10d::ReduceOp::SUM, group);");
      auto t = values(self.rank, {n});
      all_reduce(t, c10d::ReduceOp::SUM, group);
      check(t, sum());
    } else if (kind == "broadcast") {
      auto t = own();
      say("auto t = values(self.rank, {n}); broadcast(t, ranks - 1, group);");
      broadcast(t, ranks - 1, group);
      check(t, of(ranks - 1));
    } else if (kind == "all_gather") {
      auto t = torch::zeros({ranks * n}, torch::kDouble);
      say("auto t = torch::zeros({ranks * n}, torch::kDouble); all_gather_into_tensor(t, "
          "values(self.rank, {n}), group);");
      all_gather_into_tensor(t, own(), group);
      check(t, all());
    } else if (kind == "all_gather_aliased") {
      auto t = torch::zeros({ranks, n}, torch::kDouble);
      t[self.rank].copy_(own());
      auto parts = t.unbind(0);
      say("auto t = torch::zeros({ranks, n}, torch::kDouble); t[self.rank].copy_(values(self.rank, "
          "{n})); auto parts = t.unbind(0);");
      say("all_gather(parts, parts[static_cast<size_t>(self.rank)], group);");
      ddp::all_gather(parts, parts[static_cast<size_t>(self.rank)], group);
      check(t.flatten(), all());
    } else if (kind == "reduce_scatter") {
      auto t = torch::zeros({n}, torch::kDouble);
      say("auto t = torch::zeros({n}, torch::kDouble); reduce_scatter_tensor(t, values(self.rank, "
          "{n * ranks}), c10d::ReduceOp::SUM, group);");
      reduce_scatter_tensor(t, values(self.rank, {n * ranks}), c10d::ReduceOp::SUM, group);
      auto whole = torch::zeros({n * ranks}, torch::kDouble);
      for (int64_t rank = 0; rank < ranks; ++rank) whole += values(rank, {n * ranks});
      check(t, whole.slice(0, self.rank * n, (self.rank + 1) * n));
    } else if (kind == "all_to_all" || kind == "all_to_all_aliased") {
      auto t = values(self.rank, {n * ranks});
      auto out = kind == "all_to_all" ? torch::zeros_like(t) : t;
      say("auto t = values(self.rank, {n * ranks}); auto out = " +
          std::string(kind == "all_to_all" ? "torch::zeros_like(t);" : "t;"));
      say("all_to_all_single(out, t, {}, {}, group);");
      all_to_all_single(out, t, {}, {}, group);
      auto expected = torch::zeros({n * ranks}, torch::kDouble);
      for (int64_t rank = 0; rank < ranks; ++rank) {
        expected.slice(0, rank * n, (rank + 1) * n) =
            values(rank, {n * ranks}).slice(0, self.rank * n, (self.rank + 1) * n);
      }
      check(out, expected);
    } else if (kind == "messages") {
      messages();
    } else if (kind == "in_child") {
      in_child();
    } else if (kind == "unequal") {
      // A program's error, which every rank reads: the last rank has an element more.
      auto t = torch::zeros({n + (self.rank == ranks - 1 ? 1 : 0)}, torch::kDouble);
      say("auto t = torch::zeros({n + (self.rank == ranks - 1 ? 1 : 0)}, torch::kDouble); "
          "all_reduce(t, c10d::ReduceOp::SUM, group);");
      all_reduce(t, c10d::ReduceOp::SUM, group);
    } else if (kind == "unequal_all_to_all") {
      // Another one: the last rank says that it sends more to each than they receive.
      say("std::vector<int64_t> from(ranks, n), to(ranks, self.rank == ranks - 1 ? 2 * n + 300000 "
          ": n); to[self.rank] = n;");
      say("auto in = torch::zeros({std::accumulate(to.begin(), to.end(), int64_t{0})}, "
          "torch::kDouble), out = torch::zeros({n * ranks}, torch::kDouble);");
      say("all_to_all_single(out, in, from, to, group);");
      std::vector<int64_t> from(static_cast<size_t>(ranks), n);
      std::vector<int64_t> to(
          static_cast<size_t>(ranks), self.rank == ranks - 1 ? 2 * n + 300000 : n);
      to[static_cast<size_t>(self.rank)] = n;
      auto in = torch::zeros({std::accumulate(to.begin(), to.end(), int64_t{0})}, torch::kDouble);
      auto out = torch::zeros({n * ranks}, torch::kDouble);
      all_to_all_single(out, in, from, to, group);
    }
  }

 private:
  Trace& trace() { return run_.trace; }
  void say(const std::string& text) { trace().say(text); }
  at::Tensor of(int64_t rank) const { return values(rank, {n_}); }
  at::Tensor own() const { return of(run_.self.rank); }
  at::Tensor all() const {
    std::vector<at::Tensor> parts;
    for (int64_t rank = 0; rank < ranks_; ++rank) parts.push_back(of(rank));
    return torch::cat(parts);
  }
  at::Tensor sum() const { return all().reshape({ranks_, n_}).sum(0); }
  void check(const at::Tensor& got, const at::Tensor& expected) {
    TORCH_CHECK(
        run_.is_pretended || torch::allclose(got, expected, 1e-12, 1e-12), "a collective of ", n_,
        " elements gave other values than arithmetic on rank ", run_.self.rank);
  }

  /// Each rank sends to the next one some messages, which come by their tags in another order.
  void messages() {
    const auto& self = run_.self;
    const int next = (self.rank + 1) % self.size,
              previous = (self.rank + self.size - 1) % self.size;
    const int count = n_ % 2 == 0 ? 3 : 70;
    say("std::vector<c10::intrusive_ptr<c10d::Work>> sent; const int count = " +
        std::to_string(count) + ";");
    say("for (int tag = 0; tag < count; ++tag) sent.push_back(send_async(values(self.rank + tag, "
        "{n}), (self.rank + 1) % self.size, tag, group));");
    say("for (int tag = count - 1; tag >= 0; --tag) { auto t = torch::zeros({n}, torch::kDouble); "
        "recv(t, (self.rank + self.size - 1) % self.size, tag, group); }");
    say("for (auto& work : sent) work->wait();");
    std::vector<c10::intrusive_ptr<c10d::Work>> sent;
    for (int tag = 0; tag < count; ++tag)
      sent.push_back(send_async(values(self.rank + tag, {n_}), next, tag, group_));
    for (int tag = count - 1; tag >= 0; --tag) {
      auto t = torch::zeros({n_}, torch::kDouble);
      recv(t, previous, tag, group_);
      check(t, values(previous + tag, {n_}));
    }
    for (auto& work : sent) work->wait();
  }

  /// A forked child of rank 0 may not use the parent's groups; the parent's next sums are right.
  void in_child() {
    const auto& self = run_.self;
    say("if (self.rank == 0 && fork() == 0) { alarm(2); auto t = values(1, {n}); try { "
        "all_reduce(t, c10d::ReduceOp::SUM, group); } catch (...) {} _exit(0); }");
    say("barrier(group); for (int i = 0; i < 16; ++i) { auto t = values(self.rank, {n}); "
        "all_reduce(t, c10d::ReduceOp::SUM, group); }");
    if (self.rank == 0) {
      const auto child = ::fork();
      if (child == 0) {
        ::alarm(2);
        try {
          auto t = torch::ones({n_}, torch::kDouble);
          all_reduce(t, c10d::ReduceOp::SUM, group_);
        } catch (...) {
          ::_exit(7);
        }
        ::_exit(0);
      }
      int status = 0;
      ::waitpid(child, &status, 0);
      TORCH_CHECK(
          WIFEXITED(status) && WEXITSTATUS(status) == 7,
          "a collective in a forked child did not throw there");
    }
    barrier(group_);
    for (int i = 0; i < 16; ++i) {
      auto t = own();
      all_reduce(t, c10d::ReduceOp::SUM, group_);
      check(t, sum());
    }
  }

  RankRun& run_;
  int64_t n_, ranks_;
  ProcessGroup group_;
};

}  // namespace

void run_collective(RankRun& run) {
  if (run.program.has("collective")) Collectives(run).run(run.program.label("collective"));
}

}  // namespace ddp::differential
