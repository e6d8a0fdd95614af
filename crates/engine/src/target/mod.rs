pub(crate) mod session;
