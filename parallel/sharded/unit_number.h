#pragma once

#include <cstdint>
#include <optional>

namespace ddp {

/// How many notes carry a unit's number beside its gradients.
constexpr int64_t kNumberNotes = 32;

/// Writes the last 16 binary digits of a number, each as two notes: "it is 0" and "it is 1". In a
/// sum over ranks both differ from 0 where ranks gave different digits, in every dtype.
///
/// \param notes  kNumberNotes elements.
void write_number(int64_t number, float* notes);

/// Reads from the sums of the notes what the other ranks wrote.
///
/// \param number  what this rank wrote.
/// \param others  how many other ranks there are.
///
/// \return  nothing where all wrote this number; else the number of the others, or 0 where they
///         wrote several, or the dtype does not have the sum.
std::optional<int64_t> read_number(const float* sums, int64_t number, int64_t others);

}  // namespace ddp
