// Random numbers beside those of the default generators.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace ddp {

at::Tensor generator_state(at::Generator generator);
void set_generator_state(at::Generator generator, const at::Tensor& state);

/// The generator of a group's own numbers on a device, which exists as long as the group.
///
/// \param seed  of a new one.
///
/// Threads: any.
at::Generator random_stream_of(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, c10::Device device, uint64_t seed);

/// The states of all such generators, by names that a repeated run gives them, too: of the group,
/// of this rank in it, and of the device.
std::map<std::string, at::Tensor> random_stream_states();
/// Sets the states of those that exist, and keeps the others for generators that are made later.
void set_random_stream_states(const std::map<std::string, at::Tensor>& states);

/// All such generators, whose states a repeated call restores as it restores the default ones'.
std::vector<at::Generator> random_streams();

}  // namespace ddp
