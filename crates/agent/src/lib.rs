//! Page coloring inside an unmodified program.
//!
//! Problem: only a thread of the program itself may move frames into its pages (`UFFDIO_MOVE`). It must do so while the
//! program's other threads run, allocate, fork and unmap as they please. Method: a preloaded library registers the
//! program's anonymous memory with userfaultfd. It starts one thread that answers every first touch with a frame of an
//! allowed color, from a stock of its own. Properties: no allocation, no lock shared with the program, no memory that
//! the program can make absent; whatever fails, the program goes on with frames that the kernel chooses, and it is
//! counted.
//!
//! The crate is also the vocabulary between that library and the command: [`layout`] defines the files of the
//! directory that they share, [`timing`] the measurement of a frame's color.
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
