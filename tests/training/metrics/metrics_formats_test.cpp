// The bytes and texts of metrics, and the port that answers, without LibTorch.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <ddp/internal/system/fd.h>
#include "support/taken_port.h"
#include "training/metrics/event_file.h"
#include "training/metrics/json_lines.h"
#include "training/metrics/prometheus_port.h"
#include "training/metrics/prometheus_text.h"

#include "support/catch.h"

namespace {

using ddp::http_answer;
using ddp::MetricPoint;
using ddp::PrometheusPort;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::string bytes_of(const std::vector<int>& values) {
  std::string bytes;
  for (const int value : values) bytes += static_cast<char>(value);
  return bytes;
}

/// A client of a port.
class Client {
 public:
  explicit Client(int port) : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const auto* generic = reinterpret_cast<const sockaddr*>(&address);
    if (::connect(socket_.get(), generic, sizeof address) != 0) throw std::runtime_error("connect");
  }

  void send(const std::string& text) const {
    (void)::send(socket_.get(), text.data(), text.size(), MSG_NOSIGNAL);
  }
  /// All that comes until the port closes the connection.
  std::string answer() const {
    std::string text;
    std::array<char, 4096> block{};
    ssize_t count = 0;
    while ((count = ::recv(socket_.get(), block.data(), block.size(), 0)) > 0)
      text.append(block.data(), static_cast<size_t>(count));
    return text;
  }
  std::string get(const std::string& target) const {
    send("GET " + target + " HTTP/1.1\r\nHost: x\r\n\r\n");
    return answer();
  }
  /// Whether something comes, or the port closes the connection, in that time.
  bool hears(int at_most_ms) const {
    pollfd fd{socket_.get(), POLLIN, 0};
    return ::poll(&fd, 1, at_most_ms) > 0;
  }

 private:
  ddp::Fd socket_;
};

}  // namespace

TEST_CASE("a record of an event file has its length and two checksums", "[training][pure]") {
  // The record of TensorFlow's own writer for an empty payload, and the CRC-32C of RFC 3720 that is
  // in the second one: 32 zero bytes have 0x8A9136AA.
  CHECK(
      ddp::event_record("") ==
      bytes_of({0, 0, 0, 0, 0, 0, 0, 0, 0x29, 3, 0x98, 7, 0xd8, 0xea, 0x82, 0xa2}));
  const auto record = ddp::event_record(std::string(32, '\0'));
  const uint32_t crc = 0x8A9136AA;
  const uint32_t masked = ((crc >> 15) | (crc << 17)) + 0xA282EAD8;
  REQUIRE(record.size() == 8 + 4 + 32 + 4);
  CHECK(record.substr(0, 8) == bytes_of({32, 0, 0, 0, 0, 0, 0, 0}));
  for (size_t i = 0; i < 4; ++i) {
    CHECK(static_cast<unsigned char>(record[44 + i]) == ((masked >> (8 * i)) & 0xFF));
  }
}

TEST_CASE("an event has its fields as protocol buffers write them", "[training][pure]") {
  const auto payload = [](const std::string& record) {
    return record.substr(12, record.size() - 16);
  };
  const auto two = bytes_of({0x09, 0, 0, 0, 0, 0, 0, 0, 0x40});  // wall_time = 2.0
  CHECK(payload(ddp::first_event(2)) == two + bytes_of({0x1A, 13}) + "brain.Event:2");
  CHECK(
      payload(ddp::scalar_event({"loss", 300, 2.0, 0.5})) ==
      two + bytes_of({0x10, 0xAC, 0x02}) +                    // step = 300
          bytes_of({0x2A, 13, 0x0A, 11, 0x0A, 4}) + "loss" +  // summary, value, tag
          bytes_of({0x15, 0, 0, 0, 0x3F}));                   // simple_value = 0.5f
  for (const auto& [step, bytes] : std::map<int64_t, std::vector<int>>{
           {0, {0x10, 0}},
           {127, {0x10, 0x7F}},
           {128, {0x10, 0x80, 0x01}},
           {16384, {0x10, 0x80, 0x80, 0x01}}}) {
    CHECK(
        payload(ddp::scalar_event({"", step, 2.0, 0})).substr(9, bytes.size() + 1) ==
        bytes_of(bytes) + "\x2A");
  }
}

TEST_CASE("a line of JSON has one point, whatever its name and value", "[training][pure]") {
  CHECK(
      ddp::json_line({"loss", 3, 1700000000.25, 0.1}) ==
      "{\"step\":3,\"time\":1700000000.250,\"name\":\"loss\",\"value\":0.1}\n");
  CHECK(
      ddp::json_line({"a\"b\\\xC3\xA9", 12345678, 0, 1e300}) ==
      "{\"step\":12345678,\"time\":0.000,\"name\":\"a\\\"b\\\\\xC3\xA9\",\"value\":1e+300}\n");
  for (const auto& [value, text] : std::map<double, std::string>{
           {kInfinity, "\"Infinity\""}, {-kInfinity, "\"-Infinity\""}, {-0.25, "-0.25"}}) {
    CHECK_THAT(ddp::json_line({"a", 0, 0, value}), ContainsText("\"value\":" + text + "}"));
  }
  CHECK_THAT(ddp::json_line({"a", 0, 0, NAN}), ContainsText("\"value\":\"NaN\"}"));
}

TEST_CASE(
    "what a killed program left of a line is cut off, and no other file", "[training][pure]") {
  const auto line = ddp::json_line({"loss", 3, 1, 0.5});
  const auto repair = [](const std::string& tail) {
    const auto found = ddp::repair_of_lines(tail);
    return std::vector<size_t>{size_t{found.is_ours}, found.cut, size_t{found.needs_end}};
  };
  CHECK(repair("") == std::vector<size_t>{1, 0, 0});
  CHECK(repair(line) == std::vector<size_t>{1, 0, 0});
  CHECK(repair("another text\n") == std::vector<size_t>{1, 0, 0});
  const auto whole = line.substr(0, line.size() - 1);
  CHECK(repair(line + whole) == std::vector<size_t>{1, 0, 1});
  for (size_t size = 1; size < whole.size(); ++size) {
    CAPTURE(size);
    CHECK(repair(line + line.substr(0, size)) == std::vector<size_t>{1, size, 0});
  }
  CHECK(repair(line + "step 3: loss 0.5") == std::vector<size_t>{0, 0, 0});
  CHECK(repair("{\"other\": 1") == std::vector<size_t>{0, 0, 0});
}

TEST_CASE("names get Prometheus' form", "[training][pure]") {
  for (const auto& [name, own] : std::map<std::string, std::string>{
           {"loss", "loss"},
           {"a:b_C9", "a:b_C9"},
           {"train/loss (mean)", "train_loss__mean_"},
           {"5th", "_5th"},
           {"\xC3\xA9t\xC3\xA9", "_t_"},
           {"-", "_"}}) {
    CHECK(ddp::prometheus_name(name) == own);
  }
}

TEST_CASE("names that become one in Prometheus' form stay apart", "[training][pure]") {
  std::map<std::string, MetricPoint> latest;
  for (const std::string name : {"a/b", "a_b", "a \"b\\", "ddp_metric_step"}) {
    latest[name] = {name, static_cast<int64_t>(latest.size()), 0, latest.size() + 0.5};
  }
  CHECK(
      ddp::prometheus_text(latest) ==
      "# TYPE a__b_ gauge\n"
      "a__b_{name=\"a \\\"b\\\\\"} 2.5\n"
      "# TYPE a_b gauge\n"
      "a_b{name=\"a/b\"} 0.5\n"
      "a_b 1.5\n"
      "# TYPE ddp_metric_step gauge\n"
      "ddp_metric_step 3.5\n"
      "ddp_metric_step{metric=\"a \\\"b\\\\\"} 2\n"
      "ddp_metric_step{metric=\"a/b\"} 0\n"
      "ddp_metric_step{metric=\"a_b\"} 1\n"
      "ddp_metric_step{metric=\"ddp_metric_step\"} 3\n");
  CHECK(ddp::prometheus_text({}).empty());
  latest = {{"a", {"a", 0, 0, NAN}}, {"b", {"b", 0, 0, kInfinity}}, {"c", {"c", 0, 0, -kInfinity}}};
  for (const std::string line : {"\na NaN\n", "\nb +Inf\n", "\nc -Inf\n"}) {
    CHECK_THAT(ddp::prometheus_text(latest), ContainsText(line));
  }
}

TEST_CASE("requests of HTTP get an answer once they are whole", "[training][pure]") {
  const std::string get = "GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n";
  for (size_t size = 0; size < get.size(); ++size)
    CHECK(http_answer(get.substr(0, size), "a 1\n").empty());
  CHECK(
      http_answer(get, "a 1\n") ==
      "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
      "Content-Length: 4\r\nConnection: close\r\n\r\na 1\n");
  const auto status = [](const std::string& line) {
    return http_answer(line + "\r\n\r\n", "a 1\n").substr(0, 12);
  };
  CHECK(status("GET /metrics?x=1 HTTP/1.0") == "HTTP/1.1 200");
  CHECK(status("GET / HTTP/1.1") == "HTTP/1.1 404");
  CHECK(status("POST /metrics HTTP/1.1") == "HTTP/1.1 405");
  for (const std::string line :
       {"", " ", "GET", "GET /metrics", "GET /metrics FTP/1", "\x16\x03\x01"}) {
    CHECK(status(line) == "HTTP/1.1 400");
  }
  CHECK(http_answer(std::string(8191, 'x'), "").empty());
  CHECK_THAT(http_answer(std::string(8192, 'x'), ""), ContainsText("HTTP/1.1 431"));
}

TEST_CASE("the port answers with the latest text, also to many at a time", "[training]") {
  PrometheusPort port(0);
  CHECK_THAT(Client(port.port()).get("/metrics"), ContainsText("Content-Length: 0"));
  port.publish("a 1\n");
  CHECK_THAT(Client(port.port()).get("/metrics"), ContainsText("\r\n\r\na 1\n"));
  const std::string large(size_t{4} << 20, 'x');  // more than a socket's buffer takes
  port.publish(large);
  std::vector<std::thread> threads;
  std::vector<std::string> answers(20);
  for (auto& answer : answers) {
    threads.emplace_back([&] { answer = Client(port.port()).get("/metrics"); });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& answer : answers) {
    CHECK(answer.size() > large.size());
    CHECK_THAT(answer.substr(0, 100), ContainsText("HTTP/1.1 200"));
  }
}

TEST_CASE("slow clients lose their connection, and the next ones get theirs", "[training]") {
  PrometheusPort port(0, 300);
  port.publish("a 1\n");
  std::vector<Client> slow;
  for (int i = 0; i < PrometheusPort::kMostConnections; ++i) slow.emplace_back(port.port());
  for (const auto& client : slow) client.send("GET /met");
  CHECK_THAT(Client(port.port()).get("/metrics"), ContainsText("\r\n\r\na 1\n"));  // in the end
  for (const auto& client : slow) CHECK(client.answer().empty());
}

TEST_CASE("further clients wait while as many as are allowed are connected", "[training]") {
  PrometheusPort port(0, 600'000);
  port.publish("a 1\n");
  std::vector<Client> slow;
  for (int i = 0; i < PrometheusPort::kMostConnections; ++i) slow.emplace_back(port.port());
  const Client next(port.port());
  next.send("GET /metrics HTTP/1.1\r\n\r\n");
  CHECK_FALSE(next.hears(200));
  slow.pop_back();
  CHECK_THAT(next.answer(), ContainsText("\r\n\r\na 1\n"));
}  // the destructor does not wait for the slow ones

TEST_CASE("a client that does not read its answer stops nobody", "[training]") {
  PrometheusPort port(0, 600'000);
  port.publish(std::string(size_t{32} << 20, 'x'));
  const Client deaf(port.port());
  deaf.send("GET /metrics HTTP/1.1\r\n\r\n");
  CHECK(deaf.hears(30'000));
  port.publish("a 1\n");
  CHECK_THAT(Client(port.port()).get("/metrics"), ContainsText("\r\n\r\na 1\n"));
}

TEST_CASE("a port that is taken is an error that names it", "[training][errors]") {
  const ddp::testing::TakenPort taken;
  std::string error;
  try {
    const PrometheusPort port(taken.number());
  } catch (const std::runtime_error& thrown) {
    error = thrown.what();
  }
  CHECK(
      error ==
      "MetricsOptions::prometheus: expected to listen on port " + std::to_string(taken.number()) +
          " of 127.0.0.1, got \"Address already in use\". Choose another port; 0 takes any "
          "that is free.");
}

TEST_CASE("a port can be used again at once", "[training]") {
  int number = 0;
  for (int i = 0; i < 5; ++i) {
    PrometheusPort port(number);
    number = port.port();
    CHECK_THAT(Client(number).get("/metrics"), ContainsText("200 OK"));
  }
}
