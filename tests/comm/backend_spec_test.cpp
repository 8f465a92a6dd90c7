#include "comm/group/backend_spec.h"

#include <c10/util/Exception.h>

#include "support/catch.h"

using ddp::BackendSpec;
using ddp::parse_backend;

TEST_CASE("a backend text selects a backend for each device type", "[comm][pure]") {
  CHECK(parse_backend("gloo", true) == BackendSpec{{"cpu", "gloo"}, {"cuda", "gloo"}});
  CHECK(parse_backend("nccl", true) == BackendSpec{{"cuda", "nccl"}});
  CHECK(parse_backend("cpu:gloo", true) == BackendSpec{{"cpu", "gloo"}});
  CHECK(parse_backend("shm", true) == BackendSpec{{"cpu", "shm"}});
  CHECK(parse_backend("cuda:gloo", true) == BackendSpec{{"cuda", "gloo"}});
  CHECK(
      parse_backend("cuda:nccl,cpu:gloo", true) == BackendSpec{{"cpu", "gloo"}, {"cuda", "nccl"}});
}

TEST_CASE("the empty backend text selects the fastest backends that can be used", "[comm][pure]") {
  CHECK(parse_backend("", true) == BackendSpec{{"cpu", "shm"}, {"cuda", "nccl"}});
  CHECK(parse_backend("", false) == BackendSpec{{"cpu", "shm"}});
}

TEST_CASE(
    "MPI in a program without it is an error that says how to link it", "[comm][pure][errors]") {
  CHECK_THROWS_WITH(
      ddp::check_built(parse_backend("mpi", true)),
      ContainsText(
          "backend mpi: expected a program that is linked with ddp::mpi, got one without"));
  CHECK_NOTHROW(ddp::check_built(parse_backend("cpu:gloo,cuda:nccl", true)));
}

TEST_CASE("a malformed backend text is an error that lists the backends", "[comm][pure][errors]") {
  const auto [text, message] = GENERATE(table<std::string, std::string>({
      {"glo", "expected gloo, shm, nccl, mpi or cpu:X,cuda:Y with those, got \"glo\""},
      {"GLOO", "got \"GLOO\""},
      {"cpu:ucc", "with \"ucc\""},
      {"tpu:gloo", "such as cpu, cuda and xpu, got \"tpu:gloo\" with \"tpu\""},
      {"cuda:0:gloo", "with \"0:gloo\""},
      {"xpu:gloo", "expected a backend that is registered for xpu, for gloo serves CPU tensors"},
      {"cpu:gloo,nccl", "expected device:backend pairs as in cpu:gloo,cuda:nccl"},
      {"gloo,nccl", "expected device:backend pairs"},
      {"cpu:gloo,", "expected no comma at the end"},
      {",cpu:gloo", "expected device:backend pairs"},
      {"cpu:", "with \"\""},
      {"cpu:gloo,cpu:gloo", "expected each device once"},
      {"cuda:shm", "shm serves CPU tensors only, got \"cuda:shm\""},
      {"cpu:nccl", "nccl serves CUDA tensors only, got \"cpu:nccl\""},
  }));
  CAPTURE(text);
  CHECK_THROWS_AS(parse_backend(text, true), c10::ValueError);
  CHECK_THROWS_WITH(
      parse_backend(text, true), ContainsText("backend(): ") && ContainsText(message) &&
                                     ContainsText("Write gloo, shm, nccl or cpu:shm,cuda:nccl"));
}

TEST_CASE("a backend spec prints in the form in which it is written", "[comm][pure]") {
  CHECK(ddp::to_string(parse_backend("cuda:nccl,cpu:gloo", true)) == "cpu:gloo,cuda:nccl");
}
