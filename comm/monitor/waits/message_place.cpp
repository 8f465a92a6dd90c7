#include "monitor/waits/message_place.h"

#include <ddp/internal/text.h>

namespace ddp {
namespace {

constexpr const char* kSend = "send to rank ";
constexpr const char* kReceive = "recv from rank ";

bool begins_with(const std::string& text, const std::string& prefix) {
  return text.compare(0, prefix.size(), prefix) == 0;
}

}  // namespace

std::string message_place(bool sends, int peer, int tag) {
  return ddp::str(sends ? kSend : kReceive, peer, " with tag ", tag);
}

bool is_message_place(const std::string& where) {
  return begins_with(where, kSend) || begins_with(where, kReceive);
}

std::string advice_for_message(const std::string& where, const std::string& others) {
  const bool both_send = begins_with(where, kSend) && others.find(kSend) != std::string::npos;
  return both_send
             ? ". A send ends once it is received: receive first on one of them, or start the "
               "sends with send_async or batch_isend_irecv"
             : "";
}

}  // namespace ddp
