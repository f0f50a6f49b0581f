//! Is there memory for a table of this size? A failed allocation aborts the process; checking first turns the failure
//! into an error.

/// Tests whether memory of this size can be allocated. The allocator requests large sizes from the kernel; the memory
/// is not touched, and is released at once.
pub fn can_allocate(bytes: u64) -> bool {
    let mut probe_buffer: Vec<u8> = Vec::new();
    let can_reserve =
        usize::try_from(bytes).is_ok_and(|bytes| probe_buffer.try_reserve_exact(bytes).is_ok());
    // Without a visible use, the compiler would remove the allocation, and the check would always succeed.
    std::hint::black_box(&probe_buffer);
    can_reserve
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is a small size possible, and one beyond any address space rejected?
    #[test]
    fn allocations_beyond_any_address_space_are_rejected() {
        assert!(can_allocate(0) && can_allocate(1 << 20));
        assert!(!can_allocate(u64::MAX) && !can_allocate(1 << 62));
    }
}
