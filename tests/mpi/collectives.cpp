// Compares collectives over MPI with those over shared memory, element by element. Values differ by
// rank and place, so that parts in a wrong order show.
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "mpi/world.h"

namespace mpi_world {
namespace {

/// Small numbers, so that products stay finite and 16 bits hold them.
at::Tensor values(int64_t numel, at::ScalarType dtype, int rank) {
  const auto place = at::arange(numel, at::kLong);
  const auto small = (place * 37 + rank * 11 + at::floor_divide(place, 1000)) % 13 - 5 + rank % 2;
  return small.to(dtype);
}

const std::vector<at::ScalarType> kDtypes{
    at::kFloat,  at::kDouble, at::kHalf,   at::kBFloat16,     at::kChar,
    at::kByte,   at::kInt,    at::kLong,   at::kBool,         at::kShort,
    at::kUInt16, at::kUInt32, at::kUInt64, at::kComplexFloat, at::kComplexDouble};
const std::vector<int64_t> kSizes{0, 1, 1000, 100003};

/// Runs `call` over both groups on equal inputs, or catches that both refuse it.
void compare(
    const std::string& what, const ProcessGroup& mpi, const ProcessGroup& other,
    const std::function<at::Tensor(const ProcessGroup&)>& call) {
  const auto run = [&](const ProcessGroup& group, std::string& error) {
    try {
      return call(group);
    } catch (const c10::ValueError& refused) {
      error = refused.what_without_backtrace();
      return at::Tensor();
    }
  };
  std::string error_of_mpi;
  std::string error_of_other;
  const auto got = run(mpi, error_of_mpi);
  const auto expected = run(other, error_of_other);
  require(
      error_of_mpi.empty() == error_of_other.empty(),
      what + ": only one backend refuses it: " + error_of_mpi + error_of_other);
  if (error_of_mpi.empty()) require_equal(got, expected, what);
}

void compare_reductions(const ProcessGroup& mpi, const ProcessGroup& other) {
  const int rank = mpi->getRank();
  for (const auto dtype : kDtypes) {
    for (const auto numel : kSizes) {
      for (const auto op : {Op::SUM, Op::AVG, Op::PRODUCT, Op::MIN, Op::MAX, Op::BAND, Op::BXOR}) {
        const auto what = std::string("all_reduce ") + at::toString(dtype) + " x " +
                          std::to_string(numel) + ", operation " + std::to_string(op);
        compare(what, mpi, other, [&](const ProcessGroup& group) {
          auto tensor = values(numel, dtype, rank);
          ddp::all_reduce(tensor, op, group);
          return tensor;
        });
      }
      compare("reduce", mpi, other, [&](const ProcessGroup& group) {
        auto tensor = values(numel, dtype, rank);
        ddp::reduce(tensor, group->getSize() - 1, Op::SUM, group);
        return rank == group->getSize() - 1 ? tensor : at::zeros({1});
      });
    }
  }
}

void compare_moves(const ProcessGroup& mpi, const ProcessGroup& other) {
  const int rank = mpi->getRank();
  const int size = mpi->getSize();
  for (const auto dtype : kDtypes) {
    for (const auto numel : kSizes) {
      const auto own = values(numel, dtype, rank);
      const auto whole = values(numel * size, dtype, rank);
      const auto zeros = [&](int64_t count) { return at::zeros({count}, own.options()); };
      compare("broadcast", mpi, other, [&](const ProcessGroup& group) {
        auto tensor = own.clone();
        ddp::broadcast(tensor, size - 1, group);
        return tensor;
      });
      compare("all_gather_into_tensor", mpi, other, [&](const ProcessGroup& group) {
        auto to = zeros(numel * size);
        ddp::all_gather_into_tensor(to, own, group);
        return to;
      });
      compare("reduce_scatter_tensor", mpi, other, [&](const ProcessGroup& group) {
        auto to = zeros(numel);
        ddp::reduce_scatter_tensor(to, whole, Op::SUM, group);
        return to;
      });
      compare("all_to_all_single", mpi, other, [&](const ProcessGroup& group) {
        auto to = zeros(numel * size);
        ddp::all_to_all_single(to, whole, {}, {}, group);
        return to;
      });
      compare("all_gather and scatter of lists", mpi, other, [&](const ProcessGroup& group) {
        std::vector<at::Tensor> lists;
        for (int r = 0; r < size; ++r) lists.push_back(zeros(numel));
        ddp::all_gather(lists, own, group);
        auto part = zeros(numel);
        ddp::scatter(part, rank == 0 ? lists : std::vector<at::Tensor>{}, 0, group);
        lists.push_back(part);
        return at::cat(lists);
      });
    }
  }
  compare("a tensor that is not contiguous", mpi, other, [&](const ProcessGroup& group) {
    auto tensor = values(12000, at::kFloat, rank).view({100, 120}).t();
    ddp::all_reduce(tensor, Op::SUM, group);
    ddp::broadcast(tensor, 0, group);
    return tensor.contiguous();
  });
}

/// Tensors that go in several pieces.
void compare_pieces(const ProcessGroup& mpi, const ProcessGroup& other) {
  const int rank = mpi->getRank();
  const int size = mpi->getSize();
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const auto own = values(4000003 * (dtype == at::kFloat ? 1 : 2), dtype, rank);
    for (const auto op : {Op::SUM, Op::AVG}) {
      compare("all_reduce in pieces", mpi, other, [&](const ProcessGroup& group) {
        auto tensor = own.clone();
        ddp::all_reduce(tensor, op, group);
        return tensor;
      });
    }
    compare("broadcast in pieces", mpi, other, [&](const ProcessGroup& group) {
      auto tensor = own.clone();
      ddp::broadcast(tensor, 1, group);
      return tensor;
    });
    compare("reduce_scatter_tensor in pieces", mpi, other, [&](const ProcessGroup& group) {
      auto to = at::zeros({own.numel() / size}, own.options());
      ddp::reduce_scatter_tensor(to, own.slice(0, 0, to.numel() * size), Op::SUM, group);
      return to;
    });
  }
}

/// Other rows on each rank, some of them twice, and none on the last one.
void compare_sparse(const ProcessGroup& mpi, const ProcessGroup& other) {
  const int rank = mpi->getRank();
  const int64_t rows = rank == mpi->getSize() - 1 ? 0 : 3000 + rank;
  const auto indices = (at::arange(rows) * 37 + rank * 5).remainder(4000).unsqueeze(0);
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    compare("all_reduce of sparse tensors", mpi, other, [&](const ProcessGroup& group) {
      std::vector<at::Tensor> tensors{
          at::sparse_coo_tensor(indices, values(rows * 5, dtype, rank).view({rows, 5}), {4000, 5})};
      group->allreduce(tensors)->wait();
      return tensors[0].to_dense();
    });
  }
  std::vector<at::Tensor> tensors{at::sparse_coo_tensor({3}, at::kFloat)};
  c10d::AllreduceOptions options;
  options.reduceOp = Op::MAX;
  bool is_refused = false;
  try {
    mpi->allreduce(tensors, options)->wait();
  } catch (const c10::ValueError&) {
    is_refused = true;
  }
  require(is_refused, "the largest of sparse tensors is not refused");
}

/// Each rank sends to the next one: short and long, in both orders of tags.
void compare_messages(const ProcessGroup& mpi) {
  const int rank = mpi->getRank();
  const int size = mpi->getSize();
  const int next = (rank + 1) % size;
  const int previous = (rank + size - 1) % size;
  for (const int64_t numel : {0, 5, 4096, 100003}) {
    const auto sent = values(numel, at::kFloat, rank);
    const auto again = sent + 1;
    const auto first = ddp::send_async(sent, next, 3, mpi);
    const auto second = ddp::send_async(again, next, 4, mpi);
    const auto third = ddp::send_async(sent + 2, next, 4, mpi);
    auto got = at::empty_like(sent);
    auto late = at::empty_like(sent);
    auto last = at::empty_like(sent);
    ddp::recv(late, previous, 4, mpi);
    ddp::recv(got, previous, 3, mpi);
    ddp::recv(last, previous, 4, mpi);
    for (const auto& work : {first, second, third}) work->wait();
    const auto expected = values(numel, at::kFloat, previous);
    require_equal(got, expected, "a message");
    require_equal(late, expected + 1, "a message with another tag");
    require_equal(last, expected + 2, "the second message with a tag");
    const auto to_any = ddp::send_async(sent, next, 5, mpi);
    const int sender = ddp::recv(last, std::nullopt, 5, mpi);
    to_any->wait();
    require(sender == previous, "a message of any rank names another sender");
    require_equal(last, expected, "a message of any rank");
  }
}

/// Collectives of lists, several tensors at once, and parts of other sizes for each rank.
void compare_lists(const ProcessGroup& mpi, const ProcessGroup& other) {
  const int rank = mpi->getRank();
  const int size = mpi->getSize();
  const auto ranks = static_cast<size_t>(size);
  const auto list_of = [&](int64_t numel, int64_t first) {
    std::vector<at::Tensor> list;
    for (int r = 0; r < size; ++r) list.push_back(values(numel, at::kFloat, rank) + first + r);
    return list;
  };
  for (const int64_t numel : {3, 5000}) {
    compare("all_to_all of a list", mpi, other, [&](const ProcessGroup& group) {
      std::vector<at::Tensor> to = list_of(numel, 0);
      std::vector<at::Tensor> from = list_of(numel, 100);
      group->alltoall(to, from)->wait();
      return at::cat(to);
    });
    compare("gather", mpi, other, [&](const ProcessGroup& group) {
      std::vector<std::vector<at::Tensor>> to;
      if (rank == 1) to.push_back(list_of(numel, 0));
      std::vector<at::Tensor> from{values(numel, at::kFloat, rank)};
      c10d::GatherOptions options;
      options.rootRank = 1;
      group->gather(to, from, options)->wait();
      return rank == 1 ? at::cat(to[0]) : at::zeros({1});
    });
    compare("reduce_scatter of a list", mpi, other, [&](const ProcessGroup& group) {
      std::vector<at::Tensor> to{at::zeros({numel})};
      std::vector<std::vector<at::Tensor>> from{list_of(numel, 0)};
      group->reduce_scatter(to, from)->wait();
      return to[0];
    });
    compare("all_gather of several tensors", mpi, other, [&](const ProcessGroup& group) {
      std::vector<at::Tensor> from{
          values(numel, at::kFloat, rank), values(2 * numel, at::kFloat, rank + 1)};
      std::vector<at::Tensor> to{at::zeros({numel * size}), at::zeros({2 * numel * size})};
      group->allgather_into_tensor_coalesced(to, from)->wait();
      return at::cat(to);
    });
    compare("all_reduce of several tensors", mpi, other, [&](const ProcessGroup& group) {
      auto tensors = list_of(numel, 7);
      group->allreduce_coalesced(tensors)->wait();
      return at::cat(tensors);
    });
    compare("parts of other sizes", mpi, other, [&](const ProcessGroup& group) {
      // Rank r sends (r + 1) * (to + 1) elements, times numel.
      std::vector<int64_t> sent(ranks);
      std::vector<int64_t> received(ranks);
      int64_t to_numel = 0;
      int64_t from_numel = 0;
      for (int r = 0; r < size; ++r) {
        from_numel += sent[static_cast<size_t>(r)] = (rank + 1) * (r + 1) * numel;
        to_numel += received[static_cast<size_t>(r)] = (r + 1) * (rank + 1) * numel;
      }
      auto to = at::zeros({to_numel});
      ddp::all_to_all_single(to, values(from_numel, at::kFloat, rank), received, sent, group);
      return to;
    });
  }
  ddp::barrier(mpi);
}

/// Many collectives under way, in groups that start them in other orders.
void many_at_once(const ProcessGroup& mpi) {
  const int rank = mpi->getRank();
  const int size = mpi->getSize();
  std::vector<int> all;
  for (int r = 0; r < size; ++r) all.push_back(r);
  const auto second = ddp::new_group(all, mpi);
  std::vector<at::Tensor> tensors;
  std::vector<c10::intrusive_ptr<c10d::Work>> works(600);
  for (int64_t i = 0; i < 600; ++i) tensors.push_back(at::full({1 + i % 7 * 5000}, rank + i));
  const auto start = [&](size_t i) {
    works[i] = ddp::all_reduce_async(tensors[i], Op::SUM, i % 2 == 0 ? mpi : second);
    if (i % 50 == static_cast<size_t>(rank)) std::this_thread::sleep_for(2ms);
  };
  // One group's first, then the other's: on odd ranks the other way round.
  for (const size_t half : {0, 1}) {
    for (size_t i = (half + static_cast<size_t>(rank)) % 2; i < 600; i += 2) start(i);
  }
  for (size_t i = 0; i < 600; ++i) {
    works[i]->wait();
    const auto sum = size * (size - 1) / 2 + size * static_cast<int64_t>(i);
    require_equal(tensors[i], at::full_like(tensors[i], sum), "all-reduce " + std::to_string(i));
  }
}

/// Groups of groups: each half of the ranks by itself, and the halves' ranks with each other.
void compare_halves(const ProcessGroup& mpi) {
  const int rank = mpi->getRank();
  const int size = mpi->getSize();
  const int half = size / 2;
  const auto inner = ddp::split_group(rank / half, rank, mpi);
  const auto across = ddp::split_group(rank % half, rank, mpi);
  const auto place = at::arange(20000, at::kDouble);
  auto tensor = place * (rank + 1);
  ddp::all_reduce(tensor, Op::SUM, inner);
  ddp::all_reduce(tensor, Op::SUM, across);
  require_equal(tensor, place * (size * (size + 1) / 2), "a sum over groups of groups");
  if (half < 2) return;
  const auto innermost = ddp::split_group(inner->getRank(), 0, inner);
  tensor = place + rank;
  ddp::all_reduce(tensor, Op::SUM, innermost);
  require_equal(tensor, place + rank, "a sum of one rank");
}

}  // namespace

void compare_collectives() {
  const auto mpi = group_over("mpi");
  // shm reduces in the same order; the ranks are on one host.
  const auto other = group_over("shm");
  require(mpi->getBackend(c10::kCPU)->getBackendName() == "mpi", "the backend is another");
  compare_reductions(mpi, other);
  compare_moves(mpi, other);
  compare_pieces(mpi, other);
  compare_sparse(mpi, other);
  compare_lists(mpi, other);
  compare_messages(mpi);
  many_at_once(mpi);
  compare_halves(mpi);
}

void compare_rounding() {
  const auto mpi = group_over("mpi");
  const auto other = group_over("shm");
  const int rank = mpi->getRank();
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    for (const int64_t numel : {1000, 4000000}) {
      const auto own = (values(numel, at::kDouble, rank) / 7 + rank).to(dtype);
      for (const auto op : {Op::SUM, Op::AVG}) {
        const auto what = std::string(" of rounded ") + at::toString(dtype);
        compare("all_reduce" + what, mpi, other, [&](const ProcessGroup& group) {
          auto tensor = own.clone();
          ddp::all_reduce(tensor, op, group);
          return tensor;
        });
        compare("reduce_scatter_tensor" + what, mpi, other, [&](const ProcessGroup& group) {
          auto to = at::zeros({numel / mpi->getSize()}, own.options());
          ddp::reduce_scatter_tensor(to, own, op, group);
          return to;
        });
      }
    }
  }
}

void huge() {
  const auto mpi = group_over("mpi", 600s);
  const auto rank = mpi->getRank();
  const int64_t bytes = (int64_t{1} << 31) + 5;
  // Bytes of all values, other ones in each MiB: so a part in a wrong place shows.
  const auto expected_of = [&](int root) {
    const auto places = at::arange(1 << 20).to(at::kByte).unsqueeze(0);
    const auto mib = at::arange((bytes >> 20) + 1, at::kLong).unsqueeze(1);
    const auto first = (mib * 7 + at::floor_divide(mib, 1024) * 3 + root).to(at::kByte);
    return (places + first).flatten().narrow(0, 0, bytes);
  };
  {
    const auto expected = expected_of(0);
    auto tensor = rank == 0 ? expected.clone() : at::zeros_like(expected);
    ddp::broadcast(tensor, 0, mpi);
    require_equal(tensor, expected, "a broadcast of 2 GiB");
    if (rank != 0) tensor.zero_();
    if (rank == 0) ddp::send(tensor, 1, 0, mpi);
    if (rank == 1) ddp::recv(tensor, 0, 0, mpi);
    if (rank <= 1) require_equal(tensor, expected, "a message of 2 GiB");
  }
  {
    auto tensor = expected_of(rank);
    ddp::all_reduce(tensor, Op::MAX, mpi);
    auto expected = expected_of(0);
    for (int other = 1; other < mpi->getSize(); ++other) {
      at::max_out(expected, expected, expected_of(other));
    }
    require_equal(tensor, expected, "an all-reduce of 2 GiB");
  }
}

}  // namespace mpi_world
