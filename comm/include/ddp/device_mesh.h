#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ddp/export.h>
#include <ddp/process_group.h>

namespace ddp {

/// The ranks of a group laid out in a grid with named axes, and a group along each axis.
///
///     auto mesh = ddp::init_device_mesh({2, 2, 2}, {"pp", "dp", "tp"});
///     ddp::DistributedDataParallel model(
///         net, ddp::DistributedDataParallelOptions().process_group(mesh.group("dp")));
///
/// Rank 5 of these 8 has the coordinate (1, 0, 1): the last axis is the fastest, so that ranks
/// which differ by one, and often share a host, are neighbors on it.
///
/// Copies, and the meshes of some axes, share the groups. All groups of a mesh are one job with the
/// group it was made of: a rank that fails in one of them ends the waits of all ranks in all of
/// them, within seconds, and the text names its rank and coordinate.
///
/// Threads: const members from any thread, except flatten().
/// Source: torch.distributed.device_mesh.DeviceMesh, torch 2.11.0.
class DDP_API DeviceMesh {
 public:
  /// The group of the ranks that differ from this one on that axis alone, in the order of their
  /// coordinates. Always the same group. An axis of size 1 has a group of one rank, without
  /// connections.
  ///
  /// \throws c10::ValueError  if the mesh has no such axis.
  ProcessGroup group(const std::string& dim) const;
  /// The group of a mesh of one axis, wherever a group is taken:
  /// `DistributedDataParallelOptions().process_group(mesh[{"dp"}])`.
  ///
  /// \throws c10::ValueError  for a mesh of several axes, and names flatten().
  operator ProcessGroup() const;  // NOLINT: implicit
  /// This rank's coordinate on that axis, which is its rank in group(dim).
  int rank(const std::string& dim) const;
  /// How many ranks the axis has.
  int size(const std::string& dim) const;
  /// The axes of this mesh, in order.
  std::vector<std::string> names() const;
  /// The sizes of the axes.
  std::vector<int64_t> shape() const;
  /// This rank's coordinate on each axis.
  std::vector<int> coordinate() const;

  /// The rank at a coordinate, in the group that the whole mesh was made of. A mesh of some axes
  /// has this rank's coordinate on the others.
  ///
  /// \param coordinate  one number for each axis of this mesh.
  /// \throws c10::ValueError  for another number of them, or one outside its axis.
  int rank_at(const std::vector<int>& coordinate) const;

  /// The mesh of some axes: `mesh[{"dp", "tp"}]`.
  ///
  /// \param dims  names of axes, in the order of this mesh.
  /// \throws c10::ValueError  for no, unknown or repeated axes, or another order.
  DeviceMesh operator[](const std::vector<std::string>& dims) const;

  /// The group of the ranks that differ from this one on those axes alone, in row-major order.
  /// Makes it in the first call.
  ///
  /// \param dims  as of operator[].
  ///
  /// Collective: yes, over the group that the whole mesh was made of; later calls with the same
  /// axes are local. Blocks: host. Cost: as split_group(); none for one axis, or for all.
  ProcessGroup flatten(const std::vector<std::string>& dims) const;

 private:
  struct Whole;
  friend DeviceMesh init_device_mesh(
      std::vector<int64_t> shape, std::vector<std::string> names, const GroupArg& parent);

  DeviceMesh(std::shared_ptr<Whole> whole, std::vector<size_t> axes);
  size_t axis(const std::string& dim) const;
  std::vector<size_t> axes_of(const std::vector<std::string>& dims, const char* call) const;

  std::shared_ptr<Whole> whole_;
  std::vector<size_t> axes_;  // of the whole mesh; ascending
};

/// Makes a mesh of all ranks of a group, with the groups of all its axes.
///
/// \param shape  sizes of the axes; their product is the size of `parent`.
/// \param names  of the axes, each once.
/// \param parent  a group that this library made.
/// \throws c10::ValueError  for a bad shape or names. c10::Error on every rank if ranks give
///         different ones, or one does not call it in time.
///
/// Collective: yes, over the parent. Blocks: host.
/// Cost: two exchanges of texts for all axes together, and connecting.
/// Source: torch.distributed.device_mesh.init_device_mesh, torch 2.11.0.
DDP_API DeviceMesh init_device_mesh(
    std::vector<int64_t> shape, std::vector<std::string> names, const GroupArg& parent = {});

}  // namespace ddp
