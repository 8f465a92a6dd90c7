#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ddp {

/// The uses of units in one forward pass, with the times at which each was entered and left; and
/// the orders of backward that follow from them, the same on every rank whatever gradients arrive.
///
/// Autograd reaches the uses in the reverse order of their exits, and leaves out those that nothing
/// depends on: of all that it can run, it runs what forward made last.
class PassOrder {
 public:
  struct Use {
    size_t unit;
    int64_t entry;
    int64_t exit = -1;  // -1: not left yet
    bool has_backward;  // it has a graph, or is computed again
    int64_t call;       // repeated_call() that computes it again; 0: none
  };

  /// \return the index of the use.
  size_t enter(size_t unit, bool has_backward, int64_t call);
  void leave(size_t use);

  const Use& use(size_t index) const { return uses_[index]; }
  const std::vector<Use>& uses() const { return uses_; }
  /// The units, each once, in the order of their first entries.
  std::vector<size_t> units() const;
  int64_t first_entry(size_t unit) const;
  /// The last use of the unit in a repeated call; npos if there is none.
  size_t last_in_call(size_t unit, int64_t call) const;
  /// Whether the use's repeated call uses its unit several times.
  bool is_one_of_several(size_t use) const;
  /// The times between which forward did what backward does at once: the use, or the uses of its
  /// repeated call.
  int64_t begin_of(size_t use) const;
  int64_t end_of(size_t use) const;

  /// The uses that backward gets to, in its order: by their exits, the last first.
  std::vector<size_t> backward() const;

  static constexpr size_t npos = static_cast<size_t>(-1);

 private:
  std::vector<Use> uses_;
  int64_t time_ = 0;
};

}  // namespace ddp
