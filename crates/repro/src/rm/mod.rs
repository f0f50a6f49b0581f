//! RapidMRC: miss-rate curves of running programs from short logs, and phases (thesis ch. 5).

pub mod alone;
