// The blocks of code in README.md and docs, which extract_blocks.cmake makes functions of.
#pragma once

#include <vector>

struct PageBlock {
  const char* place;  // "docs/join.md:3"
  void (*run)();
  const char* why_not_run;  // what the page says before the block; "": it runs
  bool makes_group;         // the default one
};

const std::vector<PageBlock>& blocks_of_pages();

/// Makes the names that the blocks use, anew.
///
/// \param has_group  whether there is a default group: without one only the data are made.
void make_names(bool has_group);
/// Drops what would outlive the group.
void drop_names();
