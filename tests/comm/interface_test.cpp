#include "comm/base/network_interface.h"

#include <c10/util/Exception.h>

#include "support/catch.h"

using ddp::choose_gloo_devices;

TEST_CASE("Gloo listens on the loopback device for ranks of one host", "[comm][pure]") {
  const auto host = GENERATE("", "127.0.0.1", "localhost");
  CAPTURE(host);
  const auto devices = choose_gloo_devices({}, host);
  CHECK(devices.interfaces.empty());
  CHECK((devices.address == "127.0.0.1" || devices.address == "::1"));
}

TEST_CASE("a loopback address of the user is kept", "[comm][pure]") {
  CHECK(choose_gloo_devices({}, "::1").address == "::1");
  CHECK(choose_gloo_devices({}, "127.0.0.5").address == "127.0.0.5");
}

TEST_CASE("GLOO_SOCKET_IFNAME decides the interfaces", "[comm][pure]") {
  ddp::Environment environment;
  environment.gloo_interfaces = ddp::Setting{"GLOO_SOCKET_IFNAME", "lo"};
  CHECK(choose_gloo_devices(environment, "127.0.0.1").interfaces == std::vector<std::string>{"lo"});
}

TEST_CASE(
    "an interface that does not exist is an error that lists those that do",
    "[comm][pure][errors]") {
  ddp::Environment environment;
  environment.gloo_interfaces = ddp::Setting{"GLOO_SOCKET_IFNAME", "lo,nope0"};
  CHECK_THROWS_AS(choose_gloo_devices(environment, ""), c10::ValueError);
  CHECK_THROWS_WITH(
      choose_gloo_devices(environment, ""),
      ContainsText(
          "GLOO_SOCKET_IFNAME: expected interfaces of this host, got \"nope0\". There are ") &&
          ContainsText("lo") && ContainsText(": set it to those that lead to the other ranks"));
}

TEST_CASE("a host that does not resolve is an error that names it", "[comm][pure][errors]") {
  CHECK_THROWS_WITH(
      choose_gloo_devices({}, "no-such-host.invalid"),
      ContainsText("expected rank 0's host to have an address, got \"no-such-host.invalid\"") &&
          ContainsText("MASTER_ADDR"));
}
