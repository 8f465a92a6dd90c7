// A rank that ends while others wait: they are to know whether what they wait for still comes.
#include <chrono>
#include <thread>

#include "passes.h"
#include "support/error_of.h"
#include "support/recording_backend.h"

#include "support/catch.h"

namespace ddp {
namespace {

class Awaited : public c10d::Work {
 public:
  void end() { finish(); }
};

// Of a world of two, whose ranks share nothing but the store.
std::unique_ptr<Reducer> reducer_of(
    int rank, const c10::intrusive_ptr<c10d::Store>& store, testing::Events& events) {
  const auto backend = c10::make_intrusive<testing::RecordingBackend>(rank, 2, events);
  return std::make_unique<Reducer>(
      std::vector<NamedParameter>{{"w", testing::parameter()}}, testing::group_over(backend, store),
      ReducerOptions());
}

void wait_for_the_model(Reducer& reducer, Awaited& work) {
  reducer.wait_before_forward(work, "the model of rank 0", /*host_reads=*/true);
}

}  // namespace

TEST_CASE("a rank that has sent all may end before the others have it", "[pure][reducer][errors]") {
  const bool has_sent = GENERATE(true, false);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  testing::Events events;
  auto sender = reducer_of(0, store, events);
  const auto receiver = reducer_of(1, store, events);
  const auto sent = c10::make_intrusive<Awaited>();
  sent->end();
  if (has_sent) wait_for_the_model(*sender, *sent);
  sender.reset();

  const auto awaited = c10::make_intrusive<Awaited>();
  std::thread transport([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(1300));  // longer than ranks are patient
    awaited->end();
  });
  const auto error = testing::error_of([&] { wait_for_the_model(*receiver, *awaited); });
  transport.join();
  if (has_sent) {
    CHECK(error == "");
  } else {
    CHECK_THAT(error, ContainsText("rank 0 of 2 ended its training after 0 reduced backward"));
  }
}

}  // namespace ddp
