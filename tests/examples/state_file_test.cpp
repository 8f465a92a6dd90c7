#include "examples/mnist/state_file.h"
#include <sys/stat.h>

#include <string>
#include <vector>

#include <torch/torch.h>

#include "examples/common/output_file.h"
#include "support/catch.h"
#include "support/temporary_folder.h"

namespace {

using ddp::testing::TemporaryFolder;

size_t files_in(const TemporaryFolder& folder) {
  return ddp::testing::names_in(folder.path()).size();
}

}  // namespace

TEST_CASE("a saved network loads with equal parameters", "[examples][pure]") {
  const TemporaryFolder folder;
  mnist::Net saved;
  mnist::save(saved, folder.file("net.pt"));
  CHECK(files_in(folder) == 1);

  mnist::Net loaded;
  torch::load(loaded, folder.file("net.pt"));
  const auto expected = saved->named_parameters();
  const auto parameters = loaded->named_parameters();
  CHECK(
      parameters.keys() == std::vector<std::string>{
                               "conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias",
                               "fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"});
  for (const auto& parameter : parameters) {
    CAPTURE(parameter.key());
    CHECK(torch::equal(parameter.value(), expected[parameter.key()]));
  }
}

TEST_CASE("saving replaces an existing file", "[examples][pure]") {
  const TemporaryFolder folder;
  const auto path = folder.write("net.pt", "old");
  mnist::save(mnist::Net(), path);
  mnist::Net loaded;
  CHECK_NOTHROW(torch::load(loaded, path));
  CHECK(files_in(folder) == 1);
}

TEST_CASE("a save that fails leaves the folder as it was", "[examples][errors]") {
  const TemporaryFolder folder;
  REQUIRE(mkdir(folder.file("taken").c_str(), 0700) == 0);
  folder.write("taken/file", "a folder that rename cannot replace");
  CHECK_THROWS(mnist::save(mnist::Net(), folder.file("taken")));
  CHECK(files_in(folder) == 1);
}

TEST_CASE("a path where nothing can be saved is reported before training", "[examples][errors]") {
  const TemporaryFolder folder;
  CHECK_NOTHROW(examples::check_can_write("--save", folder.file("net.pt")));
  CHECK_THROWS_WITH(
      examples::check_can_write("--save", folder.file("missing/net.pt")),
      ContainsText("expected a folder to write to, got " + folder.file("missing")));
  CHECK_THROWS_WITH(
      examples::check_can_write("--save", folder.path()),
      ContainsText("expected the name of a file, got a folder"));
}
