#pragma once

/// What a shared ddp exports: the library is compiled with hidden visibility, so a function or a
/// class without this cannot be reached from a program.
#define DDP_API [[gnu::visibility("default")]]
