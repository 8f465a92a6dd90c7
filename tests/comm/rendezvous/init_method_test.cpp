#include "comm/rendezvous/init_method.h"

#include <c10/util/Exception.h>

#include "support/catch.h"

using ddp::InitMethod;
using ddp::parse_init_method;

TEST_CASE("an init_method is parsed", "[comm][pure]") {
  CHECK(parse_init_method("env://").kind == InitMethod::Kind::kEnv);
  CHECK(parse_init_method("mpi://").kind == InitMethod::Kind::kMpi);

  const auto tcp = parse_init_method("tcp://10.0.0.1:29500?rank=1&world_size=2");
  CHECK(tcp.kind == InitMethod::Kind::kTcp);
  CHECK(tcp.host == "10.0.0.1");
  CHECK(tcp.port == 29500);
  CHECK(tcp.rank->value == "1");
  CHECK(tcp.world_size->value == "2");

  const auto v6 = parse_init_method("tcp://[::1]:80");
  CHECK(v6.host == "::1");
  CHECK(v6.port == 80);
  CHECK_FALSE(v6.rank);

  const auto file = parse_init_method("file:///shared/meet");
  CHECK(file.kind == InitMethod::Kind::kFile);
  CHECK(file.path == "/shared/meet");
}

TEST_CASE("the error of a bad URL shows the valid forms", "[comm][pure][errors]") {
  CHECK_THROWS_WITH(
      parse_init_method("http://h:1"),
      ContainsText("init_method(): expected env://, tcp://host:port, file:///path or mpi://, got "
                   "\"http://h:1\"") &&
          ContainsText("Write it in one of these forms"));
}

TEST_CASE("a bad init_method is an error that names what is wrong", "[comm][pure][errors]") {
  const auto [url, message] = GENERATE(table<std::string, std::string>({
      {"", "it has no \"://\""},
      {"localhost:29500", "it has no \"://\""},
      {"http://h:1", "\"http://\" is not known"},
      {"env://x", "nothing but ?rank="},
      {"tcp://", "it has no port"},
      {"tcp://host", "it has no port"},
      {"tcp://[::1]", "it has no port"},
      {"tcp://:29500", "it has no host"},
      {"tcp://::1:29500", "needs brackets"},
      {"tcp://h:70000",
       "the port in init_method(\"tcp://h:70000\"): expected a number from 1 to 65535, got "
       "\"70000\". Give a free port of rank 0's host"},
      {"tcp://h:x", "the port in init_method(\"tcp://h:x\"): expected a whole number"},
      {"tcp://h:1?rnak=1", "it has \"rnak\" after '?'"},
      {"tcp://h:1?rank", "\"rank\" is not name=value"},
      {"file://meet", "the path must be absolute"},
      {"file:///", "the path must be absolute"},
  }));
  CAPTURE(url);
  CHECK_THROWS_AS(parse_init_method(url), c10::ValueError);
  CHECK_THROWS_WITH(parse_init_method(url), ContainsText(message));
}
