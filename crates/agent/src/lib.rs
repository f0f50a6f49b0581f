//! Page coloring inside an unmodified program.
//!
//! Which sets of a cache a page may use depends on its frame, and only a thread of the program
//! itself may move frames into its pages (`UFFDIO_MOVE`), while the program's other threads run,
//! allocate, fork and unmap. So a preloaded library registers the program's anonymous memory with
//! userfaultfd, and starts one thread that resolves every first touch with a frame of an allowed
//! color from its stock. A kernel patch would be simpler, and nobody would install it.
//!
//! For example, a program is confined to 8 of 32 colors. Three of four frames that the kernel
//! supplies have other colors; the agent keeps them, because the kernel would otherwise supply the
//! same ones again, and so holds about three times the memory that the program touches, up to a
//! limit.
//!
//! The crate also defines the interface between that library and the command: [`layout`] describes
//! the files of the directory that they share, and [`timing`] measures a frame's color.
//!
//! # Invariants
//! - No page of a program is lost, whichever process is killed.
//! - The thread does not allocate, shares no lock with the program, and uses no memory that the
//!   program can remove.
//! - After any failure the program continues with frames that the kernel selects, and the failure
//!   is counted.
#![no_std]
#![warn(missing_docs)]

#[cfg(test)]
extern crate std;

pub mod frame_pool;
pub mod handler;
pub mod handshake;
pub mod layout;
pub mod ledger;
pub mod maps;
pub mod removed_ranges;
pub mod start;
pub mod sys;
pub mod timing;

#[cfg(feature = "preload")]
mod preload;
