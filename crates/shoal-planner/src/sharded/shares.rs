//! Who keeps how much of the state, once it is known how much room everyone has.

/// Divides a total as evenly as rooms allow: everyone gets the same, or all its room where that is less. What finds no
/// room is left.
pub(crate) fn level(rooms: &[f64], total: f64) -> Vec<f64> {
    let mut order: Vec<usize> = (0..rooms.len()).collect();
    order.sort_by(|a, b| rooms[*a].total_cmp(&rooms[*b]));
    let mut shares = vec![0.0; rooms.len()];
    let mut left = total;
    for (done, place) in order.iter().enumerate() {
        let share = (left / (rooms.len() - done) as f64).min(rooms[*place]).max(0.0);
        shares[*place] = share;
        left -= share;
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_small_are_full_and_the_others_level() {
        assert_eq!(level(&[10.0, 1.0, 10.0, 2.0], 9.0), [3.0, 1.0, 3.0, 2.0]);
        assert_eq!(level(&[1.0, 2.0], 5.0), [1.0, 2.0]);
        assert_eq!(level(&[4.0, 4.0], 0.0), [0.0, 0.0]);
    }
}
