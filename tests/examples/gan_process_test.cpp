// Runs the GAN example as a user starts it.
#include <fstream>
#include <iterator>
#include <regex>
#include <string>
#include <vector>

#include "support/processes.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

namespace {

using ddp::testing::JobEnded;
using ddp::testing::TemporaryFolder;
using Lines = std::vector<std::string>;

JobEnded gan_on_two_ranks(Lines arguments) {
  arguments.insert(arguments.begin(), GAN_PROGRAM);
  return ddp::testing::run_job(2, arguments, ddp::testing::within(std::chrono::minutes(2)));
}

double number_after(const std::string& output, const std::string& pattern) {
  std::smatch match;
  CAPTURE(output, pattern);
  REQUIRE(std::regex_search(output, match, std::regex(pattern + R"(([0-9.]+))")));
  return std::stod(match[1]);
}

}  // namespace

TEST_CASE("gan learns digits on two ranks, and draws them", "[examples][process]") {
  const TemporaryFolder folder;
  const auto picture = folder.file("samples.pgm");
  const auto job = gan_on_two_ranks({"--epochs", "4", "--picture", picture});
  INFO(job.output);
  CHECK(job.code == 0);
  CHECK(job.ranks[1].empty());
  CHECK(job.ddprun.empty());
  CHECK_THAT(job.output, ContainsText("training on 1437 images of 8x8; 2 ranks"));
  CHECK_THAT(job.output, ContainsText("parameters: bitwise equal on 2 ranks"));
  CHECK_THAT(job.output, ContainsText("picture: " + picture));
  // 37.8 and then 19 when it was measured.
  const double untrained = number_after(job.output, "distance to the test digits: ");
  CHECK(untrained > 35);
  CHECK(number_after(job.output, "epoch 4/4: .* distance ") < 0.75 * untrained);

  const auto bytes = ddp::testing::read_bytes(picture);
  const std::string header = "P5\n360 360\n255\n";
  CHECK(bytes.compare(0, header.size(), header) == 0);
  CHECK(bytes.size() == header.size() + 360 * 360);
  CHECK(ddp::testing::names_in(folder.path()).size() == 1);
}

TEST_CASE("gan reports bad input", "[examples][process][errors]") {
  const TemporaryFolder folder;
  const auto check = [&](const std::string& output, const std::string& text) {
    INFO(output);
    CHECK_THAT(output, ContainsText("gan: ") && ContainsText(text));
    CHECK_THAT(output, !ContainsText("discriminator loss") && !ContainsText("frame #"));
  };
  const auto job = gan_on_two_ranks({"--data", folder.path()});
  CHECK(job.code == 1);
  check(job.output, folder.file("train-images-idx3-ubyte") + ": expected an IDX file, found none");
  const auto refuses = [&](Lines arguments, int code, const std::string& text) {
    arguments.insert(arguments.begin(), GAN_PROGRAM);
    const auto ended = ddp::testing::run(arguments);
    CHECK(ended.code == code);
    check(ended.out + ended.err, text);
  };
  refuses({"--picture", folder.file("missing/p.pgm")}, 1, "expected a folder to write to");
  refuses({"--pictures", "p.pgm"}, 2, "--pictures");
  refuses({"--lr", "1e20", "--batch-size", "512"}, 1, "samples: expected finite pixels");
}
