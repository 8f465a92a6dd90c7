// Without LibTorch.
#pragma once

#include <memory>
#include <string>
#include <thread>

namespace ddp {

/// Answers "GET /metrics" on a port of the loopback interface, on a thread of its own that waits
/// for nothing without a bound: at most kMostConnections at a time, the others wait in the kernel's
/// queue; a connection that is slower than kPatience is closed.
///
/// Thread safety: publish() from any thread; one thread constructs and destroys it.
class PrometheusPort {
 public:
  static constexpr int kMostConnections = 8;

  /// \param port  0: any that is free.
  /// \param patience_ms  the time that a connection has for its request and its answer together.
  /// \throws std::runtime_error  it cannot listen there.
  explicit PrometheusPort(int port, int patience_ms = 5000);
  /// Closes the connections, and joins the thread.
  ~PrometheusPort();
  PrometheusPort(const PrometheusPort&) = delete;
  PrometheusPort& operator=(const PrometheusPort&) = delete;

  int port() const { return port_; }
  /// Replaces the answer.
  void publish(std::string text);

 private:
  struct State;

  int port_ = 0;
  std::unique_ptr<State> state_;
  std::thread thread_;
};

/// The answer to a request of HTTP/1.1, after which the connection is closed; "" while more of the
/// request has to come.
///
/// \param metrics  the body of the answer to "GET /metrics".
std::string http_answer(const std::string& request, const std::string& metrics);

}  // namespace ddp
