//! Is there memory for a table of that size? An allocation that fails ends the process; asking first makes it an error.

/// Asks the allocator, which asks the kernel where it is much; nothing is touched and nothing kept.
pub fn is_there_room(bytes: u64) -> bool {
    let mut room: Vec<u8> = Vec::new();
    let given = usize::try_from(bytes).is_ok_and(|bytes| room.try_reserve_exact(bytes).is_ok());
    // Seen by nobody, the allocation would be left out, and always succeed.
    std::hint::black_box(&room);
    given
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is a little given, and more than any address space holds refused?
    #[test]
    fn room_is_given_as_far_as_there_is_any() {
        assert!(is_there_room(0) && is_there_room(1 << 20));
        assert!(!is_there_room(u64::MAX) && !is_there_room(1 << 62));
    }
}
