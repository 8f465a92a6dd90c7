// Makes "mpi" a backend of every program that is linked with ddp::mpi.
#include <cstdint>
#include <memory>
#include <vector>

#include <ddp/internal/check.h>
#include <ddp/internal/hash.h>

#include "backends/local_backend.h"
#include "backends/mpi/mpi_backend.h"
#include "backends/registry.h"
#include "backends/shm/backend/reduce.h"
#include "rendezvous/rendezvous.h"

namespace ddp::backends::mpi {
namespace {

/// Posts `start`'s request and waits for it on the MPI thread, which no limit would free inside
/// MPI.
template <typename Start>
void wait_on_thread(const char* call, Deadline::Clock::time_point until, const Start& start) {
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(start(&request), call);
  while (true) {
    int is_over = 0;
    check_mpi(MPI_Test(&request, &is_over, MPI_STATUS_IGNORE), "MPI_Test");
    if (is_over != 0) return;
    DDP_CHECK(
        Deadline::Clock::now() < until,
        "backend mpi: expected all ranks that MPI has started, but ", call,
        " is not over in time. Make the group on every rank.");
    std::this_thread::yield();
  }
}

class Meeting : public MpiMeeting {
 public:
  Place start(const Deadline& deadline) override {
    const auto& world = MpiThread::instance().world(deadline);
    return {world.rank, world.size};
  }

  std::string broadcast(const std::string& text, const Deadline& deadline) override {
    auto& thread = MpiThread::instance();
    const auto world = thread.world(deadline);
    const auto until = Deadline::in(deadline.left());
    const auto call = [&thread, world, until, text = text] {
      struct Message {
        uint64_t bytes;
        std::string text;
      };
      auto message = std::make_unique<Message>(Message{text.size(), text});
      const auto broadcast = [&](void* data, uint64_t bytes) {
        wait_on_thread("MPI_Ibcast", until, [&](MPI_Request* request) {
          return MPI_Ibcast(
              data, static_cast<int>(bytes), MPI_BYTE, 0, world.communicator, request);
        });
      };
      try {
        broadcast(&message->bytes, sizeof message->bytes);
        message->text.resize(message->bytes);
        broadcast(message->text.data(), message->bytes);
      } catch (...) {
        (void)message.release();  // MPI may still write to it
        thread.note_failure();
        throw;
      }
      return message->text;
    };
    const auto received = thread.ask(call, until + std::chrono::seconds(1));
    DDP_CHECK(
        received, "init_process_group: expected MPI to answer within ", deadline.timeout().count(),
        " ms, got no answer. Look for a rank that has ended.");
    return *received;
  }
};

/// Makes the communicators of a group. To be called on the MPI thread of every member at once.
void connect(const World& world, Channel& channel, const std::vector<int>& ranks, int tag) {
  MPI_Group all = MPI_GROUP_NULL;
  MPI_Group members = MPI_GROUP_NULL;
  check_mpi(MPI_Comm_group(world.communicator, &all), "MPI_Comm_group");
  check_mpi(
      MPI_Group_incl(all, static_cast<int>(ranks.size()), ranks.data(), &members),
      "MPI_Group_incl");
  check_mpi(
      MPI_Comm_create_group(world.communicator, members, tag, &channel.collectives),
      "MPI_Comm_create_group");
  check_mpi(MPI_Group_free(&members), "MPI_Group_free");
  check_mpi(MPI_Group_free(&all), "MPI_Group_free");
  for (auto* copy : {&channel.messages, &channel.elements}) {
    check_mpi(MPI_Comm_dup(channel.collectives, copy), "MPI_Comm_dup");
  }
  for (const auto communicator : {channel.collectives, channel.messages, channel.elements}) {
    check_mpi(MPI_Comm_set_errhandler(communicator, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  }
}

void check_place(const Setup& setup, const World& world) {
  const auto own = static_cast<int>(setup.global_ranks[static_cast<size_t>(setup.rank)]);
  const bool is_subgroup = setup.parent != nullptr;
  DDP_CHECK(
      own == world.rank && (is_subgroup || setup.world_size == world.size),
      "backend mpi: expected rank() and world_size() to be MPI's, ", world.rank, " of ", world.size,
      ", got ", own, " of ", setup.world_size, ". Leave them out.");
}

BackendPtr make_mpi(const Setup& setup) {
  if (setup.world_size == 1) return make_single_rank_backend("mpi", setup.timeout);
  auto& thread = MpiThread::instance();
  const auto world = thread.world(setup.connect_by);
  check_place(setup, world);
  const std::vector<int> ranks(setup.global_ranks.begin(), setup.global_ranks.end());
  const auto channel = std::make_shared<Channel>(setup.rank, setup.world_size);
  const auto hash =
      hash_of_bytes(ranks.data(), ranks.size() * sizeof(int)) ^ fnv1a(setup.group_name);
  const int tag = static_cast<int>(hash & 0x7fff);
  const auto made = thread.ask(
      [&thread, world, channel, ranks, tag] {
        connect(world, *channel, ranks, tag);
        thread.note_connected();
        return true;
      },
      Deadline::in(setup.connect_by.left()));
  DDP_CHECK(
      made, "backend mpi: expected rank ", setup.rank, " of ", setup.world_size,
      " to make communicators with the others within ", setup.connect_by.timeout().count(),
      " ms, got no answer of MPI. Look for a rank that has ended.");
  return c10::make_intrusive<MpiBackend>(channel, world.most_tag, setup.timeout);
}

RegisteredBackend describe() {
  RegisteredBackend mpi;
  mpi.name = "mpi";
  mpi.devices = {"cpu"};
  mpi.capabilities = [] {
    BackendCapabilities capabilities;
    capabilities.averages = true;
    capabilities.falls_back_to_gloo = true;  // it carries all that Gloo does
    capabilities.reductions = &shm::reductions();
    return capabilities;
  };
  mpi.make = make_mpi;
  return mpi;
}

/// Made before main(), so that it is destroyed after the default group and all others that main()
/// makes: only then MPI may end.
struct Registration {
  Registration() {
    add(describe(), /*replaces_missing=*/true);
    mpi_meeting() = &meeting;
  }
  ~Registration() { MpiThread::instance().finish(); }

  Meeting meeting;
} registration;

}  // namespace
}  // namespace ddp::backends::mpi

/// The linker keeps this file for this name, which ddp::mpi's users ask for.
extern "C" {
int ddp_mpi_registered = 1;
}
