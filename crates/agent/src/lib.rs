//! Page coloring inside an unmodified program.
//!
//! Problem: only a thread of the program itself may move frames into its pages (`UFFDIO_MOVE`), and it must do so while
//! the program's other threads run, allocate, fork and unmap. Method: a preloaded library registers the program's
//! anonymous memory with userfaultfd. It starts one thread that resolves every first touch with a frame of an allowed
//! color from its stock. Properties: the thread does not allocate, shares no lock with the program, and uses no memory
//! that the program can remove; after any failure the program continues with frames that the kernel selects, and the
//! failure is counted.
//!
//! The crate also defines the interface between that library and the command: [`layout`] describes the files of the
//! directory that they share, and [`timing`] measures a frame's color.
#![no_std]
#![warn(missing_docs)]

#[cfg(test)]
extern crate std;

pub mod frame_pool;
pub mod handler;
pub mod handshake;
pub mod layout;
pub mod maps;
pub mod removed_ranges;
pub mod start;
pub mod sys;
pub mod timing;

#[cfg(feature = "preload")]
mod preload;
