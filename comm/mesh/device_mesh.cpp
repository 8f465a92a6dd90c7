#include <ddp/device_mesh.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>
#include <utility>

#include <ddp/internal/check.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

#include "group/monitored_group.h"
#include "mesh/mesh_shape.h"
#include "subgroups/subgroups.h"

namespace ddp {

using Axes = std::vector<size_t>;

/// The state that a mesh shares with its copies, and with the meshes of some of its axes.
struct DeviceMesh::Whole {
  ProcessGroup parent;
  MeshShape shape;
  int rank;                               // in the parent
  std::vector<ProcessGroup> groups = {};  // of the axes
  std::mutex mutex = {};                  // guards flattened
  std::map<Axes, ProcessGroup> flattened = {};

  std::string place() const { return on_rank_text(*parent); }
  std::vector<ProcessGroup> connect(const char* call, const std::vector<Axes>& of_groups) const;
};

namespace {

constexpr const char* kInit = "init_device_mesh";
constexpr const char* kFlatten = "DeviceMesh::flatten";

void check_names(const MeshShape& shape, const std::string& place) {
  const auto& names = shape.names;
  DDP_CHECK_VALUE(
      names.size() == shape.sizes.size() && !names.empty(), kInit,
      ": expected a name for each axis, got ", shape.sizes.size(), " sizes and ", names.size(),
      " names ", place, ". Name each axis.");
  for (size_t i = 0; i < names.size(); ++i) {
    DDP_CHECK_VALUE(
        !names[i].empty(), kInit, ": expected names of axes, got \"\" for axis ", i, " ", place,
        ". Name each axis.");
    DDP_CHECK_VALUE(
        shape.find(names[i]) == i, kInit, ": expected different names, got \"", names[i],
        "\" twice ", place, ". Name each axis once.");
  }
}

void check_sizes(const MeshShape& shape, int ranks, const std::string& place) {
  const auto& sizes = shape.sizes;
  const bool positive = all_of(sizes, [](int64_t size) { return size > 0; });
  const bool fits = all_of(sizes, [&](int64_t size) {
    return size <= ranks;  // so that the product cannot overflow in 2^31 ranks' few axes
  });
  DDP_CHECK_VALUE(
      positive, kInit, ": expected sizes of at least 1, got ", shape.to_text(), " ", place,
      ". Give an axis that is not used size 1.");
  DDP_CHECK_VALUE(
      fits && shape.product() == ranks, kInit, ": expected a shape with product ", ranks,
      ", the group's size, got ", shape.to_text(),
      fits ? ddp::str(", whose product is ", shape.product()) : "", " ", place, ". Change ",
      joined_by(", ", shape.names), ", or the number of ranks.");
}

}  // namespace

std::vector<ProcessGroup> DeviceMesh::Whole::connect(
    const char* call, const std::vector<Axes>& of_groups) const {
  std::vector<Subgroup> subgroups;
  for (const auto& axes : of_groups) {
    const auto ranks = shape.ranks_along(axes, rank);
    std::vector<std::string> names;
    for (const size_t axis : axes) names.push_back(shape.names[axis]);
    // Its first rank tells a group from the others along the same axes.
    subgroups.push_back(
        {ranks, ddp::str('.', subgroups.size(), '.', ranks[0]), joined_by("-", names),
         shape.coordinate_text(rank)});
  }
  return connect_subgroups(call, parent, subgroups);
}

DeviceMesh::DeviceMesh(std::shared_ptr<Whole> whole, Axes axes)
    : whole_(std::move(whole)), axes_(std::move(axes)) {}

size_t DeviceMesh::axis(const std::string& dim) const {
  const size_t found = whole_->shape.find(dim);
  DDP_CHECK_VALUE(
      contains(axes_, found), "DeviceMesh: expected one of the axes ", joined_by(", ", names()),
      ", got \"", dim, "\" ", whole_->place(), ". Use a name that init_device_mesh was given.");
  return found;
}

Axes DeviceMesh::axes_of(const std::vector<std::string>& dims, const char* call) const {
  Axes axes;
  for (const auto& dim : dims) axes.push_back(axis(dim));
  const bool ascend = std::is_sorted(axes.begin(), axes.end()) &&
                      std::adjacent_find(axes.begin(), axes.end()) == axes.end();
  DDP_CHECK_VALUE(
      !axes.empty() && ascend, "DeviceMesh::", call, ": expected axes, each once, in the order of ",
      joined_by(", ", names()), ", got ", dims.empty() ? "none" : joined_by(", ", dims), " ",
      whole_->place(), ". List them in the mesh's order.");
  return axes;
}

ProcessGroup DeviceMesh::group(const std::string& dim) const { return whole_->groups[axis(dim)]; }

DeviceMesh::operator ProcessGroup() const {
  DDP_CHECK_VALUE(
      axes_.size() == 1, "DeviceMesh: expected a mesh of one axis in place of a group, got ",
      axes_.size(), " axes (", joined_by(", ", names()), ") ", whole_->place(),
      ". Name one, mesh[{\"", names().front(), "\"}], or give flatten()'s group of several.");
  return whole_->groups[axes_.front()];
}

int DeviceMesh::rank(const std::string& dim) const {
  return whole_->shape.coordinate_of(whole_->rank)[axis(dim)];
}

int DeviceMesh::size(const std::string& dim) const {
  return static_cast<int>(whole_->shape.sizes[axis(dim)]);
}

std::vector<std::string> DeviceMesh::names() const {
  std::vector<std::string> names;
  for (const size_t axis : axes_) names.push_back(whole_->shape.names[axis]);
  return names;
}

std::vector<int64_t> DeviceMesh::shape() const {
  std::vector<int64_t> sizes;
  for (const size_t axis : axes_) sizes.push_back(whole_->shape.sizes[axis]);
  return sizes;
}

std::vector<int> DeviceMesh::coordinate() const {
  const auto of_whole = whole_->shape.coordinate_of(whole_->rank);
  std::vector<int> coordinate;
  for (const size_t axis : axes_) coordinate.push_back(of_whole[axis]);
  return coordinate;
}

int DeviceMesh::rank_at(const std::vector<int>& coordinate) const {
  DDP_CHECK_VALUE(
      coordinate.size() == axes_.size(), "DeviceMesh::rank_at: expected a number for each of the ",
      axes_.size(), " axes, got ", coordinate.size(), " ", whole_->place(), ". Give one an axis.");
  auto of_whole = whole_->shape.coordinate_of(whole_->rank);
  for (size_t i = 0; i < axes_.size(); ++i) {
    const auto size = whole_->shape.sizes[axes_[i]];
    DDP_CHECK_VALUE(
        coordinate[i] >= 0 && coordinate[i] < size, "DeviceMesh::rank_at: expected 0 to ", size - 1,
        " on axis ", whole_->shape.names[axes_[i]], ", got ", coordinate[i], " ", whole_->place(),
        ". Count each axis from 0.");
    of_whole[axes_[i]] = coordinate[i];
  }
  return whole_->shape.rank_at(of_whole);
}

DeviceMesh DeviceMesh::operator[](const std::vector<std::string>& dims) const {
  return {whole_, axes_of(dims, "operator[]")};
}

ProcessGroup DeviceMesh::flatten(const std::vector<std::string>& dims) const {
  const auto axes = axes_of(dims, "flatten");
  if (axes.size() == 1) return whole_->groups[axes[0]];
  if (axes.size() == whole_->shape.names.size()) return whole_->parent;
  const std::lock_guard lock(whole_->mutex);
  auto& made = whole_->flattened[axes];
  if (made) return made;
  exchange_equal_texts(kFlatten, whole_->parent, [&] { return joined_by(", ", dims); });
  return made = whole_->connect(kFlatten, {axes})[0];
}

DeviceMesh init_device_mesh(
    std::vector<int64_t> shape, std::vector<std::string> names, const GroupArg& parent_arg) {
  const auto parent = parent_arg.get();
  made_here(kInit, parent);
  const auto whole = std::make_shared<DeviceMesh::Whole>();
  whole->parent = parent;
  whole->rank = parent->getRank();
  whole->shape = {std::move(shape), std::move(names)};
  exchange_equal_texts(kInit, parent, [&] {
    check_names(whole->shape, whole->place());
    check_sizes(whole->shape, parent->getSize(), whole->place());
    return whole->shape.to_text();
  });
  Axes all(whole->shape.names.size());
  std::iota(all.begin(), all.end(), size_t{0});
  std::vector<Axes> each;
  for (const size_t axis : all) each.push_back({axis});
  whole->groups = whole->connect(kInit, each);
  return {whole, all};
}

}  // namespace ddp
