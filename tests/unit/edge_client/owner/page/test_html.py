from xml.etree.ElementTree import tostring

import pytest

from edge_client.owner.page.html import quote_name, render, tag, unquote_name


def test_text_and_attributes_cannot_become_markup() -> None:
    written = tostring(tag("p", "<b>", tag("i", "&"), " \"tail' <", title='"><script>'), "unicode", "html")
    assert written == '<p title="&quot;&gt;<script&gt;">&lt;b&gt;<i>&amp;</i> "tail\' &lt;</p>'
    element = tag("a", None, ["x", None, tag("b")], href=None, disabled=False, hidden=True)
    assert tostring(element, "unicode", "html") == '<a hidden="">x<b></b></a>'
    # controls in foreign text are shown: Else a name could turn the direction of the text around it, and bytes that
    # are not UTF-8 could not be sent
    page = render("a", "pi\u202e", "/", tag("p", "\udcff\x00"), every_s=3).decode()
    assert "pi\\u202e" in page
    assert "\\udcff\\u0000" in page
    assert page.count('aria-current="page"') == 1


@pytest.mark.parametrize("name", ["a b&=+%.png", "\udcff.png", "Käfer/ö.png", ""])
def test_names_of_files_survive_a_form(name: str) -> None:
    assert unquote_name(quote_name(name)) == name
    assert quote_name(name).isascii()
