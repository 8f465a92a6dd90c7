// A rank of a mesh fails in a group of one axis while others wait in groups of the other axis: all
// end, and name it.
#include <deque>
#include <regex>
#include <string>
#include <vector>

#include "support/processes.h"
#include "support/world.h"

#include "support/catch.h"

using namespace std::chrono_literals;
using namespace ddp::testing;

namespace {

// Milliseconds in which the peers learn of an end, their start included: less than the timeout.
constexpr int kMeshEndsIn = 30000;

struct MeshScene {
  std::string axis;
  int victim;
  std::string backend;
};

const std::vector<MeshScene> kMeshScenes{
    {"tp", 3, "gloo"}, {"dp", 3, "shm"}, {"dp", 0, "gloo"}, {"tp", 0, "shm"}};

/// A mesh whose victim fails.
class FailingMesh {
 public:
  /// \param seconds  the groups' timeout.
  FailingMesh(const std::string& what, const MeshScene& scene, int seconds)
      : scene_(scene),
        world_(
            {MESH_WORLD_PROGRAM, what, scene.axis, std::to_string(scene.victim), scene.backend,
             std::to_string(seconds)},
            4, 90s) {
    world_.start_all();
  }

  const MeshScene& scene() const { return scene_; }

  /// Checks that the victim's three peers end within `at_most` ms, and what they say has `words`.
  void check_peers(int at_most, const std::string& words) {
    CAPTURE(scene_.axis, scene_.victim, scene_.backend, words);
    for (int rank = 0; rank < 4; ++rank) {
      if (rank == scene_.victim) continue;
      const auto end = world_.rank(rank).wait();
      CAPTURE(rank, end.out, end.err);
      CHECK(end.code == 0);
      const auto learned = numbers_after(end.out, "learned after ");
      REQUIRE(learned.size() == 1);
      CHECK(learned[0] < at_most);
      CHECK(std::regex_search(end.out, std::regex(words)));
    }
  }

 private:
  const MeshScene scene_;
  World world_;
};

/// What the peers of a rank that ended say. Without the store, which rank 0 hosts, one may look
/// when the victim's neighbor has left, too.
std::string end_of(int victim) {
  return victim == 3 ? "rank 3 of 4 has ended, or left the process group"
                     : "(rank 0|ranks 0, [^o]*) of 4 (has|have) ended, or left the process group "
                       "\\(rank 0 hosts the store";
}

/// What they say of a rank that stopped. The one whose time is over first waits for the victim, or
/// for the victim's neighbor, which waits for it.
std::string stop_of(const MeshScene& scene) {
  if (scene.victim == 0) return "the store, which rank 0 hosts, has not answered for .* ms";
  const std::string neighbor = scene.axis == "tp" ? "2" : "1";
  return "had arrived, rank 3 had not|had arrived, rank " + neighbor + " had not; rank " +
         neighbor + " waits in all_reduce of process group \"" + scene.axis + " \\[" + neighbor +
         ", 3\\]\"";
}

}  // namespace

TEST_CASE("all axes of a mesh end when a rank throws", "[comm][mesh][process][errors]") {
  for (const auto& scene : kMeshScenes) {
    const std::string coordinate = scene.victim == 3 ? "dp 1, tp 1" : "dp 0, tp 0";
    FailingMesh("throw", scene, 60)
        .check_peers(
            kMeshEndsIn, "an exception in the program of rank " + std::to_string(scene.victim) +
                             " of 4 \\(" + coordinate + "\\)");
  }
}

TEST_CASE("all axes of a mesh end when a rank is killed", "[comm][mesh][process][errors]") {
  for (const auto& scene : kMeshScenes) {
    FailingMesh("kill", scene, 60).check_peers(kMeshEndsIn, end_of(scene.victim));
  }
}

TEST_CASE("all axes of a mesh end when a rank is stopped", "[comm][mesh][process][errors]") {
  std::deque<FailingMesh> meshes;  // at the same time, because their ranks wait
  for (const auto& scene : kMeshScenes) meshes.emplace_back("stop", scene, 20);
  for (auto& mesh : meshes) mesh.check_peers(45000, stop_of(mesh.scene()));
}
