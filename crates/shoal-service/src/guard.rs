//! Who may come in: what a request's headers must say before anything else of it is looked at. Pure, so that anything can
//! be fed to it.
//!
//! `Host` keeps out pages that have a name of theirs point here, `Origin` pages that use a browser's reach: a name counts
//! only if it is ours, and an address cannot be somebody's trick.

use std::net::{IpAddr, Ipv6Addr};

/// Whether a `Host` header is one of this controller's: any address, or a name that it was told it has.
pub fn host_is_ours(host: &str, names: &[String]) -> bool {
    let Some(name) = without_port(host) else { return false };
    if let Some(inner) = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')) {
        return inner.parse::<Ipv6Addr>().is_ok();
    }
    name.parse::<IpAddr>().is_ok_and(|address| address.is_ipv4())
        || name.eq_ignore_ascii_case("localhost")
        || names.iter().any(|ours| ours.eq_ignore_ascii_case(name))
}

/// Whether an `Origin` header is the page that this controller itself would serve at that `Host`.
pub fn origin_is_ours(origin: &str, host: &str) -> bool {
    origin.strip_prefix("https://").is_some_and(|origin| origin.eq_ignore_ascii_case(host))
}

fn without_port(host: &str) -> Option<&str> {
    let (name, port) = match host.rfind(':') {
        Some(at) if !host.ends_with(']') => (&host[..at], Some(&host[at + 1..])),
        _ => (host, None),
    };
    port.is_none_or(|port| !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit())).then_some(name)
}

/// The token of an `Authorization` header.
pub fn bearer(header: &str) -> Option<&str> {
    let (scheme, token) = header.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

/// The numbers of a query, by the names that are allowed. Anything else is refused.
pub fn numbers<const N: usize>(query: &str, names: [&str; N]) -> Option<[Option<u64>; N]> {
    let mut values = [None; N];
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=')?;
        let place = names.iter().position(|known| *known == name)?;
        values[place] = Some(value.parse().ok()?);
    }
    Some(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_addresses_or_names_that_are_ours() {
        let names = ["fleet.example".to_owned()];
        for ours in ["127.0.0.1:7700", "10.0.0.7", "[::1]:7700", "[::1]", "localhost:1", "Fleet.Example:7700"]
        {
            assert!(host_is_ours(ours, &names), "{ours}");
        }
        for foreign in [
            "",
            "evil.example",
            "evil.example:7700",
            "localhost.evil",
            "127.0.0.1.evil:1",
            "::1",
            "a:b",
            ":",
            "[x]",
        ] {
            assert!(!host_is_ours(foreign, &names), "{foreign}");
        }
    }

    #[test]
    fn origins_are_our_own_page() {
        assert!(origin_is_ours("https://127.0.0.1:7700", "127.0.0.1:7700"));
        for foreign in ["null", "http://127.0.0.1:7700", "https://127.0.0.1:7701", "https://evil.example", ""]
        {
            assert!(!origin_is_ours(foreign, "127.0.0.1:7700"), "{foreign}");
        }
    }

    #[test]
    fn queries_are_numbers() {
        assert_eq!(numbers("after=3&wait_ms=9", ["after", "wait_ms"]), Some([Some(3), Some(9)]));
        assert_eq!(numbers("", ["after", "wait_ms"]), Some([None, None]));
        assert_eq!(numbers("after=-1", ["after"]), None);
        assert_eq!(numbers("path=/etc", ["after"]), None);
        assert_eq!(bearer("Bearer  x "), Some("x"));
        assert_eq!(bearer("Basic x"), None);
    }
}
