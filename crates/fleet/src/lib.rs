//! A simulated fleet of hosts: which services should share a cache, and how many hosts a promise requires.
//!
//! Problem: the cluster's scheduler decides which services share a host's cache, and production clusters are not
//! available for experiments. Method: hosts, services and arrivals come from a description or a seed. Every policy
//! places the same arrivals. The interval machine gives the steady speeds of the services on one cache, once for each
//! combination. The scheduler extender ranks nodes with [`scorer`], the module that the `forecast` policy uses here.
//! Properties: the same seed gives the same bits on any number of workers; time and memory grow linearly with hosts,
//! because hosts are simulated in cells of bounded size.

#![warn(missing_docs)]

pub mod arrivals;
pub mod cell;
pub mod cluster_export;
pub mod corun;
mod curve_program;
pub mod extender;
mod fleet_page;
pub mod host;
pub mod node_report;
mod node_table;
pub mod outcome;
pub mod placement;
mod placement_ledger;
mod placement_policy;
pub mod profile;
pub mod publication;
pub mod scorer;
pub mod spec;
pub mod study;
pub mod validation;
