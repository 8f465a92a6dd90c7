#pragma once

/// Marks what a shared ddp exports: the library is compiled with hidden visibility, so a program
/// cannot reach a function or a class without this.
#define DDP_API [[gnu::visibility("default")]]
