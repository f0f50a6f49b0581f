//! Tests that leave the host alone: one program, because each test program links the whole command.

mod cluster_packaging;
#[path = "../common/mod.rs"]
mod common;
mod convention;
mod curves;
mod demo;
mod extender_watch;
mod fleet;
mod foreign_files;
mod huge;
mod interrupt;
mod interval;
mod json;
mod lab_report;
mod mistypings;
mod planted_links;
mod profile_export;
mod readme;
mod repro_store;
mod services_interval;
