//! A Kubernetes cluster around the daemon: what a node publishes, and the extender that ranks nodes by it.
//!
//! The scheduler chooses a node before a pod has run there, and knows nothing of caches. So each
//! daemon writes the state of its node's caches and the profiles of its services as objects of the
//! API server ([`node_publisher`]), and the extender watches these objects ([`knowledge_watch`]) and
//! answers the scheduler over HTTP ([`extender_server`]). What is computed from them is pure and in
//! the crate `fleet`; here are the files, sockets, threads and clocks.
//!
//! For example, a node that fills its cache with 2 GB/s publishes this every ten seconds while it
//! changes, and a pod whose image has a profile gets a score for it within a millisecond. A client
//! library would do the same for a fifth more of the workspace's build, so the few requests are
//! written out ([`api_server`]).
//!
//! # Invariants
//! - A server that refuses, hangs or is gone delays neither the daemon's loop nor an answer.
//! - A token leaves this host only under encryption.
//! - An object that is forged, too large or unreadable is skipped and reported once.

pub mod api_server;
pub mod extender;
mod extender_metrics;
mod extender_server;
pub mod knowledge_objects;
mod knowledge_watch;
pub mod node_publisher;
